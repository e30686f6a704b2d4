"""The threads of all ranks, and what they do one thing after the other.

Threads are those of a run: one trains, one communicates, under lookahead one plans. What a thread
does waits for what it did before, and for tasks of other threads that it names. All ranks do the
same, each with numbers of its own, ``[W]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pibroch.errors import ConfigError
from pibroch.sim.cluster import Cluster, Flow
from pibroch.sim.machine import Link, Machine
from pibroch.sim.operation import Operation
from pibroch.sim.timeline import ALONE, Floats, Tasks, Timeline

TRAINING = "training"
COMMUNICATION = "communication"
PLANNER = "planner"
IDS = "ids"


@dataclass(frozen=True, slots=True)
class Sent:
    """What ranks send in one message exchange.

    Attributes:
        flow: the bytes.
        groups: ranks that exchange messages among each other.
        summed: bytes of the numbers of each rank that are summed, ``[W]``; ``None`` where each rank
            sends what others need.
    """

    flow: Flow
    groups: Sequence[Sequence[int]]
    summed: Floats | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """What a thread of every rank did.

    Attributes:
        thread: which.
        name: of it.
        tasks: ``[W]``.
        seconds: of work, ``[W]``.
        after: tasks, ``[W]`` each, of other threads among others, that it waited for.
        sent: what it sent, if it did.
    """

    thread: str
    name: str
    tasks: Tasks
    seconds: Floats
    after: Sequence[Tasks]
    sent: Sent | None = None


class Program:
    """Builds the graph of what ranks do.

    Args:
        cluster: on which.
        machine: what it takes there.
        jitter: spread of the times of work: the standard deviation of its logarithm.
        seed: of the jitter.
    """

    def __init__(
        self, cluster: Cluster, machine: Machine, jitter: float = 0.0, seed: int = 0
    ) -> None:
        self.cluster = cluster
        self.machine = machine
        self.spans: list[Span] = []
        size = cluster.num_ranks
        is_device = machine.accelerator is not None
        # cores of each machine, or a device a rank; then links out of and into each host
        self._num_places = size if is_device else cluster.num_machines
        cores = [1.0 if is_device else cluster.cores] * self._num_places
        self._place = np.arange(size) if is_device else cluster.machine_of_rank
        self._out = self._num_places + cluster.host_of_rank
        self._in = self._out + cluster.num_hosts
        num_links = 2 * cluster.num_hosts
        self._line = Timeline(
            [*cores, *[1.0] * num_links],
            [*[0.0] * len(cores), *[cluster.burst / cluster.link] * num_links],
        )
        self._last: dict[str, Tasks] = {}
        self._jitter = jitter
        self._rng = np.random.default_rng(seed)

    def work(
        self, thread: str, name: str, seconds: Floats | float, after: Sequence[Tasks] = ()
    ) -> Tasks:
        """CPU of a thread of each rank; returns its tasks."""
        size = self.cluster.num_ranks
        seconds = self.machine.slowdown * np.broadcast_to(np.asarray(seconds, np.float64), size)
        if self._jitter:  # of mean 1
            noise = self._rng.normal(-0.5 * self._jitter**2, self._jitter, size)
            seconds = seconds * np.exp(noise)
        return self._next(thread, name, self._place, seconds, after)

    def operation(self, thread: str, operation: Operation, after: Sequence[Tasks] = ()) -> Tasks:
        """All parts of an operation and the messages between them; returns its last tasks."""
        tasks = self._next(
            thread, operation.name, np.full(self.cluster.num_ranks, ALONE), 0.0, after
        )
        for number, part in enumerate(operation.parts):
            cost = operation.seconds[number] if operation.seconds else None
            if self.machine.knows(operation):
                cost = self.machine.cost(operation.name, number, part)
            if cost is None:
                raise ConfigError(
                    f"calibration {self.machine.name!r}, which does not know {operation.name!r}",
                    "one that was measured for this exchange",
                    "make it again with `pibroch simulate calibrate`",
                )
            if operation.extra:
                cost = cost + operation.extra[number]
            tasks = self.work(thread, operation.name, cost)
            if number < len(operation.sent):
                flow = self.flow(operation.sent[number])
                tasks = self.exchange(thread, operation.name, flow, groups=operation.groups)
        return tasks

    def flow(self, sent: Flow | np.ndarray) -> Flow:
        """What crosses links, of bytes from rank to rank."""
        return sent if isinstance(sent, Flow) else Flow.of(sent, self.cluster.host_of_rank)

    def exchange(
        self,
        thread: str,
        name: str,
        flow: Flow,
        rounds: int | Floats = 1,
        groups: Sequence[Sequence[int]] | None = None,
        summed: Floats | None = None,
    ) -> Tasks:
        """A message of each rank to all others; returns the tasks that end when all has come.

        Of W ranks the last one to call holds back a share of ``1 / (W - 1)`` of what each of the
        others waits for; what the rest sends may go before. A part of a sum passes through all
        ranks: of its 2 (W - 1) rounds the ranks behind the last one have had 0 to W - 2 before.

        Once all has come, each rank's thread waits for a core and the interpreter; all go on with
        the last of them.

        Between H hosts all but a share of ``1 / (H - 1)`` of what a link carries competes at the
        other end with flows from third hosts; a sum's ring has one flow a link.

        Args:
            thread: that sends and waits.
            name: of what it does.
            flow: the bytes.
            rounds: messages one after the other, each as long as a latency; of each rank, or all.
            groups: whose members wait for each other alone; all ranks are one when absent.
            summed: see :class:`Sent`.
        """
        size = self.cluster.num_ranks
        groups = [range(size)] if groups is None else groups
        posted = self._last[thread]
        everyone = posted.copy()
        hosts = self.cluster.host_of_rank
        others, beside, competing = (np.zeros(size) for _ in range(3))
        latency_s, wait_s = (np.zeros(size) for _ in range(2))
        for group in groups:
            members = np.array(group)
            if len(members) > 1:
                everyone[members] = self._line.join([posted[members]])
                others[members] = len(members) - 1
                here = hosts[members]
                beside[members] = np.bincount(here)[here] - 1
                link = self._link_of(members)
                own_rounds = np.broadcast_to(rounds, size)[members]
                latency_s[members] = own_rounds * link.message_s
                wait_s[members] = link.wait_s * _longest(len(members))
                elsewhere = len(np.unique(here)) - 1
                competing[members] = max(0, elsewhere - 1) / max(1, elsewhere)
        if not others.any():
            return posted
        early = (others - 1).clip(0) / others.clip(1)
        if summed is not None:
            early = early / 4
            competing[:] = 0
        network = self.machine.network
        memory = self.machine.memory
        nobody = np.full(size, ALONE)
        first_bytes = self._line.add(nobody, latency_s, [everyone])
        ends = [first_bytes]
        rate = self.cluster.link * network.wire_share * (1 - network.contention * competing)
        for resource, num_bytes in ((self._out, flow.out_link), (self._in, flow.in_link)):
            if num_bytes.any():
                first = self._line.add(resource, early * num_bytes / rate, [posted])
                ends.append(
                    self._line.add(resource, (1 - early) * num_bytes / rate, [first, first_bytes])
                )
        local = flow.out_local + flow.in_local
        if local.any():
            ends.append(self._line.add(nobody, local / 2 / self.cluster.local, [everyone]))
        cpu = _cpu(network, flow.out_link + flow.in_link, np.maximum(others - beside, rounds))
        cpu = cpu + _cpu(memory, local, np.maximum(beside, rounds))
        if cpu.any() and self.machine.accelerator is None:
            ends.append(self._line.add(self._place, cpu, [everyone]))
        if wait_s.any():
            ends = [self._line.add(nobody, wait_s, ends)]
        return self._next(thread, name, nobody, 0.0, ends, Sent(flow, groups, summed))

    def wait(self, thread: str, name: str, tasks: Tasks) -> Tasks:
        """The thread does nothing before some tasks have ended."""
        return self._next(thread, name, np.full(self.cluster.num_ranks, ALONE), 0.0, [tasks])

    def last(self, thread: str) -> Tasks:
        """The last tasks of a thread."""
        return self._last[thread]

    def run(self) -> tuple[Floats, Floats]:
        """When each task begins and ends."""
        return self._line.run()

    def _link_of(self, ranks: Tasks) -> Link:
        """What carries messages between some ranks."""
        crosses = len(set(self.cluster.host_of_rank[ranks].tolist())) > 1
        return self.machine.network if crosses else self.machine.memory

    def _next(
        self,
        thread: str,
        name: str,
        resource: np.ndarray,
        seconds: Floats | float,
        after: Sequence[Tasks],
        sent: Sent | None = None,
    ) -> Tasks:
        before = [self._last[thread]] if thread in self._last else []
        work = np.broadcast_to(np.asarray(seconds, np.float64), len(resource))
        tasks = self._line.add(resource, work, [*before, *after])
        self._last[thread] = tasks
        self.spans.append(Span(thread, name, tasks, work, after, sent))
        return tasks


def _longest(num_waits: int) -> float:
    """The longest of so many waits over their mean, where they are distributed exponentially."""
    return float((1 / np.arange(1, num_waits + 1)).sum())


def _cpu(link: Link, num_bytes: Floats, messages: Floats) -> Floats:
    return link.call_cpu_s * messages * (num_bytes > 0) + link.byte_cpu_s * num_bytes
