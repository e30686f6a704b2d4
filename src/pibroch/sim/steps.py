"""What the threads of a rank do in a step: the schedules of exchanges, with a dense model between.

Exchanges run by the same schedules. Sums of dense gradients: :mod:`pibroch.collectives.gradients`.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from pibroch.exchange import raw_ids
from pibroch.exchange.schedule import FAR_AHEAD, Moment, Queue
from pibroch.sim.cluster import Flow
from pibroch.sim.counting import StepCount, looks_far
from pibroch.sim.machine import DenseCost
from pibroch.sim.operation import Operation
from pibroch.sim.program import COMMUNICATION, IDS, PLANNER, TRAINING, Program
from pibroch.sim.timeline import Tasks
from pibroch.sim.towers import ByTowers, PlacedModules


@dataclass(frozen=True, slots=True)
class Dense:
    """The dense model of each rank.

    Attributes:
        cost: of a step.
        num_samples: of a rank's batch.
        towers: whose modules run where their tables are; ``None`` for a model that is whole.
    """

    cost: DenseCost
    num_samples: int
    towers: ByTowers | None = None

    def seconds(self, part: str) -> float:
        """Of a part of the step."""
        call, sample = getattr(self.cost, part)
        return float(call + sample * self.num_samples)

    @property
    def modules(self) -> PlacedModules | None:
        """Of towers that run where their tables are."""
        return None if self.towers is None else self.towers.modules

    @property
    def parameter_bytes(self) -> int:
        """Of the rank that has most."""
        whole = self.cost.early_bytes + self.cost.late_bytes
        if self.modules is None:
            return whole
        return sum(self.sum_bytes) + max(self.modules.num_bytes)

    @property
    def sum_bytes(self) -> tuple[int, int]:
        """Of gradients that all ranks sum, early and late ones."""
        early = self.cost.early_bytes
        late = self.cost.late_bytes
        inside = 0 if self.modules is None else sum(self.modules.num_bytes)
        return max(0, early - inside), late - max(0, inside - early)

    def sums(self, hosts: NDArray[np.int64]) -> list[Flow]:
        """What sums of gradients send a step."""
        flows = [Flow.ring(sum(self.sum_bytes), hosts)]
        if self.towers is not None and self.modules is not None:
            flows.append(self.sums_inside(self.towers, self.modules, hosts))
        return flows

    @staticmethod
    def sums_inside(towers: ByTowers, modules: PlacedModules, hosts: NDArray[np.int64]) -> Flow:
        """What sums of the gradients of modules send, each over its group of hosts."""
        return Flow.rings(modules.num_bytes, towers.places.groups, hosts)


def run_steps(program: Program, counts: Sequence[StepCount], dense: Dense, num_steps: int) -> None:
    """Let all threads of a program take steps by the schedule of their exchange.

    Args:
        program: is given the tasks.
        counts: what the tasks of each step do; of more steps again from the first one.
        dense: the model between lookup and gradients.
        num_steps: how many.
    """
    steps = _Steps(program, counts[0], dense)
    steps.begin(counts[0])
    for number in range(num_steps):
        steps.step(counts[number % len(counts)], counts[(number + 1) % len(counts)])


class _Steps:
    """Steps one after the other; ids of the next one, or of one far ahead, go out meanwhile."""

    def __init__(self, program: Program, count: StepCount, dense: Dense) -> None:
        self._program = program
        self._schedules = raw_ids.SCHEDULE, count.schedule
        self._dense = dense
        self._looks_far = looks_far(count.schedule)
        self._done: dict[str, Tasks] = {}

    def begin(self, count: StepCount) -> None:
        """Announce the first step and fetch its rows, where that is done one step ahead."""
        if not self._looks_far:
            self._read(count)
            self._at(Moment.READ, count)
            self._at(Moment.TURN, count)

    def step(self, count: StepCount, following: StepCount) -> None:
        """One step of all ranks."""
        program = self._program
        dense = self._dense
        # as many batches are read as are trained; of those far ahead all are alike
        read = count if self._looks_far else following
        self._read(read)
        if not self._looks_far:
            self._at(Moment.READ, read)
        program.work(TRAINING, "dense", dense.seconds("begin"))
        self._at(Moment.LOOKUP, count)
        inside = self._modules_forward(count)
        program.work(TRAINING, "dense", dense.seconds("forward") - inside)
        inside = dense.seconds("towers_backward") if dense.modules else 0.0
        program.work(TRAINING, "dense", dense.seconds("backward") - inside)
        self._at(Moment.GRADIENTS, count, {Queue.CALLER})
        early, late = dense.sum_bytes
        sums = [_sum(program, early, program.last(TRAINING))]
        sums.append(self._modules_backward(count, inside))
        self._at(Moment.GRADIENTS, count, {Queue.PLANNER, Queue.NETWORK})
        program.work(TRAINING, "dense", dense.seconds("rest"))
        sums.append(_sum(program, late, program.last(TRAINING)))
        self._at(Moment.END, count)
        if self._looks_far:
            self._at(Moment.READ, read)
        self._at(Moment.TURN, read)
        if count.has("add"):  # an announcement, when it is there, gives its step to the oracle
            program.operation(PLANNER, count["add"], [self._done["announce"]])
        for tasks in sums:
            if tasks is not None:
                program.wait(TRAINING, "sums", tasks)
        program.work(TRAINING, "dense", dense.cost.optimizer)
        program.wait(TRAINING, "step", program.last(TRAINING))

    def _read(self, count: StepCount) -> None:
        self._program.operation(TRAINING, count["read"])

    def _at(
        self, moment: Moment, count: StepCount, queues: Container[Queue] = frozenset(Queue)
    ) -> None:
        """The tasks of a moment, each behind what it waits for and what submits it."""
        program = self._program
        for task in chain.from_iterable(each.at(moment) for each in self._schedules):
            if task.on not in queues or not count.has(task.name):
                continue
            names = [each if isinstance(each, str) else each[0] for each in task.after]
            # what reading ahead brings has come long ago
            after = [
                self._done[name]
                for name in names
                if name in self._done and (name, FAR_AHEAD) not in task.after
            ]
            if task.on is Queue.CALLER:
                label = "rows" if moment == Moment.LOOKUP else ", ".join(names)
                for tasks in after:
                    program.wait(TRAINING, label, tasks)
                after = []
            else:
                after.append(program.last(TRAINING))
            self._done[task.name] = program.operation(THREADS[task.on], count[task.name], after)

    def _modules_forward(self, count: StepCount) -> float:
        """Modules read embeddings, and their outputs go home; returns their seconds."""
        dense = self._dense
        if dense.towers is None or not dense.modules:
            return 0.0
        inside = dense.seconds("towers_forward")
        self._program.work(TRAINING, "towers", inside * dense.towers.work)
        self._cross(count["embeddings"])
        return inside

    def _modules_backward(self, count: StepCount, inside: float) -> Tasks | None:
        """The gradients of their outputs come back; returns the sums of their own."""
        dense = self._dense
        if dense.towers is None or not dense.modules:
            return None
        self._cross(count["gradients"])
        self._program.work(TRAINING, "towers", inside * dense.towers.work)
        return _sum_inside(self._program, dense.towers, dense.modules)

    def _cross(self, operation: Operation) -> None:
        """Send something while the training thread waits."""
        program = self._program
        program.operation(COMMUNICATION, operation, [program.last(TRAINING)])
        program.wait(TRAINING, operation.name, program.last(COMMUNICATION))


THREADS = {
    Queue.CALLER: TRAINING,
    Queue.PLANNER: PLANNER,
    Queue.ORACLE: PLANNER,
    Queue.NETWORK: COMMUNICATION,
    Queue.IDS: IDS,
}


def _sum(program: Program, num_bytes: int, after: Tasks) -> Tasks | None:
    """A sum of dense gradients over all ranks, on the communication thread: gloo's ring."""
    size = program.cluster.num_ranks
    if size == 1 or not num_bytes:
        return None
    program.wait(COMMUNICATION, "sums", after)
    flow = Flow.ring(num_bytes, program.cluster.host_of_rank)
    summed = np.full(size, float(num_bytes))
    return program.exchange(COMMUNICATION, "sums", flow, 2 * (size - 1), summed=summed)


def _sum_inside(program: Program, towers: ByTowers, modules: PlacedModules) -> Tasks:
    """A sum of the gradients of modules over each group of hosts, likewise."""
    groups = towers.places.groups
    program.wait(COMMUNICATION, "sums", program.last(TRAINING))
    flow = Dense.sums_inside(towers, modules, program.cluster.host_of_rank)
    rounds, summed = (np.zeros(program.cluster.num_ranks) for _ in range(2))
    for members, num_bytes in zip(groups, modules.num_bytes, strict=True):
        rounds[list(members)] = 2 * (len(members) - 1)
        summed[list(members)] = num_bytes
    return program.exchange(COMMUNICATION, "sums", flow, rounds, groups, summed)


def step_seconds(program: Program, num_steps: int, warm_up: int) -> tuple[float, dict[str, float]]:
    """The mean time of steps after some, and of the training thread's time by what it did.

    Waiting is under ``waiting for`` what was waited for.
    """
    begin, end = program.run()
    spans = [each for each in program.spans if each.thread == TRAINING]
    marks = [end[each.tasks] for each in spans if each.name == "step"]
    seconds = float((marks[-1] - marks[warm_up - 1]).mean() / (num_steps - warm_up))
    parts: dict[str, float] = {}
    since = marks[warm_up - 1]
    last = since
    for span in spans:
        ends = end[span.tasks]
        if (ends <= since).all() or span.name == "step":
            continue
        waited = np.maximum(0.0, begin[span.tasks] - last).mean()
        worked = (ends - np.maximum(begin[span.tasks], since)).mean()
        if waited > 0:
            name = f"waiting for {span.name}"
            parts[name] = parts.get(name, 0.0) + float(waited)
        if worked > 0:
            parts[span.name] = parts.get(span.name, 0.0) + float(worked)
        last = ends
    steps = num_steps - warm_up
    return seconds, {name: value / steps for name, value in parts.items()}
