"""The processes that train one model together, and groups of some of them.

Also what this process exchanged with each.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Self
from weakref import WeakKeyDictionary

import torch.distributed as dist

from pibroch.collectives.channel import Channel
from pibroch.collectives.task_thread import TaskThread
from pibroch.errors import ConfigError

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
    explain: Explain | None
    traffic: Traffic = field(default_factory=Traffic)
    communication: TaskThread | None = None


class Ranks:
    """This process's place among the processes that train one model, or among some of them.

    Args:
        rank: of this process.
        world_size: number of processes.
        timeout_s: how long a collective may wait.
        explain: turns a collective's failure into the error to raise, e.g.
            :class:`RankFailedError`.

    Attributes:
        rank, world_size: within the group.
        members: the group's ranks, each by its number in the run, in the group's order.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        explain: Explain | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.members = tuple(range(world_size))
        self._process = _Process(world_size, explain)

    @classmethod
    def alone(cls) -> Ranks:
        """One process; needs no process group."""
        return cls(0, 1)

    @classmethod
    def joined(cls, timeout_s: float = DEFAULT_TIMEOUT_S) -> Ranks:
        """The members of torch.distributed's default group, one object for all callers.

        Alone when there is none.

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
    def traffic(self) -> Traffic:
        """What this process exchanged with others, as a member of any group."""
        return self._process.traffic

    @property
    def explain(self) -> Explain | None:
        """Turns a collective's failure into the error to raise; one for all groups."""
        return self._process.explain

    @explain.setter
    def explain(self, explain: Explain | None) -> None:
        self._process.explain = explain

    @property
    def communication(self) -> TaskThread:
        """The thread that sends this process's large messages, whatever group they are for."""
        if self._process.communication is None:
            self._process.communication = TaskThread()
        return self._process.communication

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
