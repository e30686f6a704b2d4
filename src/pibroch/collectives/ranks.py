"""The processes that train one model together, groups of some of them, and their collectives.

Collectives on one channel run in the order in which they were issued; those on different channels
may overlap. Every rank must issue the same collectives on a channel in the same order.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from pibroch.collectives.task_thread import TaskThread
from pibroch.collectives.transport import Transport, Wait
from pibroch.collectives.transports import open_transport
from pibroch.errors import ConfigError
from pibroch.host import this_machine
from pibroch.observability.trace import span

DEFAULT_TIMEOUT_S = 300.0
"""How long a collective waits for ranks that live but do not answer.

Ranks that die are noticed in seconds.
"""

Explain = Callable[[Exception], Exception]


@dataclass(slots=True)
class Traffic:
    """What this process exchanged with others, over the channels of all groups.

    Attributes:
        sent, received: bytes of payload, those to and from servers and data processors included.
        waited_s: seconds in which the thread that computes waited for rows or for sums of
            gradients.
        sent_to, received_from: bytes by the rank of the run that they went to or came from.
    """

    sent: int = 0
    received: int = 0
    waited_s: float = 0.0
    sent_to: Counter[int] = field(default_factory=Counter)
    received_from: Counter[int] = field(default_factory=Counter)

    def add(self, sent_to: int, sent: int, received_from: int, received: int) -> None:
        """Count bytes that went to one rank of the run and came from another, or from the same."""
        self.sent += sent
        self.received += received
        self.sent_to[sent_to] += sent
        self.received_from[received_from] += received


@dataclass(slots=True)
class _Process:
    """What the groups of one process share.

    Attributes:
        num_ranks: of the run.
        explain: turns a collective's failure into the error to raise.
        traffic: over all channels.
        communication: sends large messages, once there are any.
    """

    num_ranks: int
    explain: Explain | None = None
    traffic: Traffic = field(default_factory=Traffic)
    communication: TaskThread | None = None


class Ranks:
    """This process's place among the processes that train one model, or among some of them.

    Args:
        rank: of this process.
        world_size: number of processes.
        timeout_s: how long a collective may wait.

    Attributes:
        rank, world_size: within the group.
        members: the group's ranks, each by its number in the run, in the group's order.
    """

    def __init__(self, rank: int, world_size: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.members = tuple(range(world_size))
        self._process = _Process(world_size)

    @classmethod
    def alone(cls) -> Ranks:
        """One process; needs no process group."""
        return cls(0, 1)

    @classmethod
    def joined(cls, timeout_s: float = DEFAULT_TIMEOUT_S) -> Ranks:
        """The members of torch.distributed's default group, one object for all callers.

        Without such a group it is this process alone.

        Args:
            timeout_s: of collectives; taken from the first call.
        """
        if not dist.is_available() or not dist.is_initialized():
            return cls.alone()
        group = dist.group.WORLD
        assert group is not None
        if group not in _JOINED:
            _JOINED[group] = cls(dist.get_rank(), dist.get_world_size(), timeout_s)
        return _JOINED[group]

    def group(self, members: Sequence[int]) -> Self | None:
        """Some of these ranks as a group of their own; ``None`` on the others. Sends nothing.

        A group behaves as all ranks do and shares their communication thread, explanation of
        failures, time limit and account of traffic. Its members, and they alone, open its channels,
        in the same order.

        Args:
            members: by their numbers among these ranks; the group's rank i is ``members[i]``.

        Raises:
            ConfigError: for ranks that do not exist, or are named twice.
        """
        return self.groups([members])

    def groups(self, partition: Iterable[Sequence[int]]) -> Self | None:
        """The one of several disjoint groups that this rank is in, ``None`` if in none.

        See :meth:`group`.
        """
        partition = [list(members) for members in partition]
        named = [rank for members in partition for rank in members]
        if (
            len(set(named)) < len(named)
            or not set(named) <= set(range(self.world_size))
            or not all(partition)
        ):
            raise ConfigError(
                f"groups {partition} of {self.world_size} ranks",
                f"each of 0 to {self.world_size - 1} once at most",
            )
        for members in partition:
            if self.rank in members:
                group = copy(self)
                group.rank = members.index(self.rank)
                group.world_size = len(members)
                group.members = tuple(self.members[rank] for rank in members)
                return group
        return None

    def patient(self, timeout_s: float) -> Self:
        """The same ranks, whose collectives may take another time."""
        ranks = copy(self)
        ranks.timeout_s = timeout_s
        return ranks

    @property
    def rank_in_run(self) -> int:
        """This process's rank in the run."""
        return self.members[self.rank]

    @property
    def are_all(self) -> bool:
        """Whether every rank of the run is here."""
        return self.world_size == self._process.num_ranks

    @property
    def host(self) -> str:
        """The name of this process's host, see :class:`~pibroch.collectives.topology.Topology`."""
        return this_machine()

    @property
    def traffic(self) -> Traffic:
        """What this process exchanged with others, as a member of any group."""
        return self._process.traffic

    @property
    def explain(self) -> Explain | None:
        """Turns a collective's failure into the error to raise, e.g. RankFailedError.

        One for all groups.
        """
        return self._process.explain

    @explain.setter
    def explain(self, explain: Explain | None) -> None:
        self._process.explain = explain

    @property
    def communication(self) -> TaskThread:
        """The thread that sends this process's large messages, whatever group they are for."""
        if self._process.communication is None:
            self._process.communication = self.thread("communication")
        return self._process.communication

    def thread(self, name: str) -> TaskThread:
        """A new thread of this process that does one task after the other; it ends with its use."""
        return TaskThread(f"pibroch-{name}")

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time within as waiting; for the thread that computes."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.traffic.waited_s += time.perf_counter() - start

    def open_channel(self) -> Channel:
        """A new channel between all these ranks.

        Each of them must open its channels in the same order. Blocks.
        """
        return Channel(self)


_JOINED: WeakKeyDictionary[dist.ProcessGroup, Ranks] = WeakKeyDictionary()


class Channel:
    """Collectives over all ranks of a group in one order.

    All block until done unless they return work to wait for.

    Tensors are contiguous and on the CPU; those to be summed may lie on any device.

    Args:
        ranks: the group.
        transport: between them; :func:`open_transport` chooses when absent. One rank needs none.

    Attributes:
        sent_to: bytes by the rank of the run that they went to, without sums of dense gradients.

    Raises:
        RankFailedError: (each method) when another rank failed or was lost.
    """

    def __init__(self, ranks: Ranks, transport: Transport | None = None) -> None:
        self.ranks = ranks
        self._transport = transport
        self.sent_to: Counter[int] = Counter()
        if transport is None and ranks.world_size > 1:
            with self._explained():
                self._transport = open_transport(ranks)

    def all_to_all(
        self,
        send: Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        out: Tensor | None = None,
    ) -> Tensor:
        """Send ``send_counts[p]`` consecutive rows of ``send`` to each rank p.

        Returns what came, in rank order.

        Args:
            send: ``[sum(send_counts), ...]``.
            send_counts: rows for each rank.
            receive_counts: rows from each rank, known beforehand.
            out: receives what came and is returned, if given and there are several ranks.
        """
        if self.ranks.world_size == 1:
            return send
        if out is None:
            out = torch.empty(sum(receive_counts), *send.shape[1:], dtype=send.dtype)
        self.begin_all_to_all(send.split(list(send_counts)), out.split(list(receive_counts)))()
        return out

    def begin_all_to_all(self, going: Sequence[Tensor], coming: Sequence[Tensor]) -> Wait:
        """Send ``going[p]`` to each rank p and fill ``coming[p]`` by what it sends.

        Both are of the same size.

        Returns at once, with a function that blocks until all is done. Messages of several calls
        arrive in their order.
        """
        here = self.ranks.rank
        traffic = self.ranks.traffic
        for p, peer in enumerate(self.ranks.members):
            if p != here and (going[p].nbytes or coming[p].nbytes):
                traffic.add(peer, going[p].nbytes, peer, coming[p].nbytes)
                self.sent_to[peer] += going[p].nbytes
        started: Wait | None = None
        if self._transport is not None:
            with self._explained():
                started = self._transport.post(going, coming)
        coming[here].copy_(going[here])

        def wait() -> None:
            if started is not None:
                with self._explained():
                    started()

        return wait

    def exchange_counts(self, counts: Tensor) -> Tensor:
        """Row p of int64 ``counts`` ``[W, k]`` goes to rank p.

        Returns ``[W, k]``, row p from rank p.
        """
        ones = [1] * self.ranks.world_size
        return self.all_to_all(counts, ones, ones)

    def all_reduce(self, tensor: Tensor) -> Wait:
        """Sum ``tensor`` over all ranks in place.

        Returns at once with a function that blocks until it is done.

        The communication thread sends it, so that it shares the link with no other large message.
        """
        if self._transport is None:
            return lambda: None
        transport = self._transport
        staged = tensor.to(self._transport.device)
        self._count_sum(tensor.nbytes)

        def reduce() -> Wait:
            with self._explained():
                return transport.reduce(staged)

        started = self.ranks.communication.submit(reduce)

        def wait() -> None:
            with self.ranks.waiting(), self._explained(), span("wait for dense gradients"):
                started.result()()
            if staged is not tensor:
                tensor.copy_(staged)

        return wait

    def _count_sum(self, num_bytes: int) -> None:
        """Bytes that gloo's ring sends: 2 (W - 1) / W of the data each way.

        They go to the rank before this one, and come from the one after it.
        """
        here = self.ranks.rank
        size = self.ranks.world_size
        members = self.ranks.members
        share = int(2 * (size - 1) / size * num_bytes)
        self.ranks.traffic.add(members[here - 1], share, members[(here + 1) % size], share)

    def gather(self, value: object) -> list[Any]:
        """One plain value (what JSON can hold) of every rank, in rank order, on all ranks."""
        if self.ranks.world_size == 1:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        return [json.loads(bytes(piece.numpy())) for piece in self.gather_tensors(text)]

    def gather_tensors(self, tensor: Tensor) -> list[Tensor]:
        """A tensor of every rank, in rank order, on all ranks; first dimensions may differ."""
        size = self.ranks.world_size
        if size == 1:
            return [tensor]
        own_count = torch.full((size, 1), len(tensor), dtype=torch.int64)
        counts = self.exchange_counts(own_count).flatten().tolist()
        send = tensor.repeat(size, *([1] * (tensor.ndim - 1)))
        return list(self.all_to_all(send, [len(tensor)] * size, counts).split(counts))

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gather(None)

    def close(self) -> None:
        """Give its sockets and threads back; for programs that open many."""
        if self._transport is not None:
            self._transport.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        # torch.distributed's, timeouts included, and those of sockets
        except (RuntimeError, OSError) as error:
            if self.ranks.explain is None:
                raise
            raise self.ranks.explain(error) from error
