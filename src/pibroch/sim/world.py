"""All ranks of a run in one process: each a thread, of which one runs at a time.

They do what ranks of a run do, with the same objects. What is left out is the network: a message is
there when the last of its ranks has sent its part. Threads take turns at messages alone, in the
order of ranks, so that two simulations are alike.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from pibroch.collectives.ranks import Channel, Ranks
from pibroch.collectives.task_thread import TaskThread
from pibroch.collectives.transport import Transport, Wait
from pibroch.errors import PibrochError

T = TypeVar("T")


class Account(Protocol):
    """Is told what a rank sends, on the rank's thread."""

    def post(self, members: tuple[int, ...], going: Sequence[Tensor]) -> None:
        """A message is sent: ``going[p]`` to each of the members of a group, this rank included."""

    def begin_to_wait(self) -> None:
        """The thread waits for other ranks from now on."""

    def end_to_wait(self) -> None:
        """It goes on."""


class Ended(PibrochError):
    """Another rank has failed, so this one cannot go on."""


class VirtualWorld:
    """Ranks that are threads of this process.

    Args:
        num_ranks: W.
        ranks_per_host: so many consecutive ones say that they share a host.
        accounts: of the ranks that train: all, unless messages are answered otherwise.
    """

    def __init__(
        self, num_ranks: int, ranks_per_host: int, accounts: Mapping[int, Account]
    ) -> None:
        self.num_ranks = num_ranks
        self.hosts = [f"host {rank // ranks_per_host}" for rank in range(num_ranks)]
        self._accounts = accounts
        self._failure: BaseException | None = None
        self._meetings: dict[Any, Meeting] = {}
        # who does not train any more, and what those wait for who do
        self._ended: set[int] = set()
        self._waiting: dict[int, Callable[[], bool]] = {}
        self._turn = {rank: threading.Semaphore(0) for rank in accounts}

    def account_of(self, rank: int) -> Any:
        """The account of a rank."""
        return self._accounts[rank]

    def run(self, program: Callable[[VirtualRanks], T]) -> list[T]:
        """What a program returns on each rank that trains.

        Raises:
            Exception: of the first rank that failed.
        """
        results: dict[int, T] = {}

        def of_rank(rank: int) -> None:
            self._turn[rank].acquire()
            try:
                if self._failure is None:
                    results[rank] = program(VirtualRanks(rank, self))
            except BaseException as error:
                self._failure = self._failure or error
            self._ended.add(rank)
            self._pass_turn(rank)

        threads = [
            threading.Thread(target=of_rank, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in self._accounts
        ]
        for thread in threads:
            thread.start()
        self._pass_turn(-1)
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure
        return [results[rank] for rank in self._accounts]

    def meeting(self, key: object, size: int) -> Meeting:
        """Of the messages of one channel, by a key that its ranks have in common."""
        return self._meetings.setdefault(key, Meeting(size))

    def wait(self, rank: int, is_over: Callable[[], bool]) -> None:
        """Other ranks have their turn until something is over.

        Raises:
            Ended: when a rank has failed.
        """
        if not is_over():
            self._waiting[rank] = is_over
            self._pass_turn(rank)
            self._turn[rank].acquire()
            if self._failure is not None:
                raise Ended("a simulated rank that failed", "all of them")

    def _pass_turn(self, rank: int) -> None:
        """The next rank that can go on does so, in the order of ranks."""
        left = sorted(self._accounts.keys() - self._ended, key=lambda other: (other <= rank, other))
        ready = [other for other in left if self._can_go_on(other)]
        if left and not ready:
            self._failure = PibrochError(
                f"simulated ranks {', '.join(map(str, sorted(left)))} that wait for each other",
                "the same messages of all ranks, in one order",
            )
            ready = left
        if ready:
            self._waiting.pop(ready[0], None)
            self._turn[ready[0]].release()

    def _can_go_on(self, rank: int) -> bool:
        is_over = self._waiting.get(rank)
        return self._failure is not None or is_over is None or is_over()


class VirtualRanks(Ranks):
    """One rank's place in a :class:`VirtualWorld`."""

    def __init__(self, rank: int, world: VirtualWorld) -> None:
        super().__init__(rank, world.num_ranks)
        self.world = world
        # channels that were opened, by their groups
        self._opened: defaultdict[tuple[int, ...], int] = defaultdict(int)

    @property
    def host(self) -> str:
        """See :class:`Ranks`."""
        return self.world.hosts[self.rank_in_run]

    def thread(self, name: str) -> TaskThread:
        """See :class:`Ranks`: tasks are done at once, by whoever submits them."""
        return AtOnce(name)  # type: ignore[return-value]  # in all that others use

    def open_channel(self) -> Channel:
        """See :class:`Ranks`."""
        number = self._opened[self.members]
        self._opened[self.members] += 1
        meeting = self.world.meeting((self.members, number), self.world_size)
        return Channel(self, _Virtual(self, meeting))


class AtOnce:
    """A :class:`TaskThread` without a thread."""

    def __init__(self, name: str) -> None:
        self.name = name

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Do a task now."""
        done: Future[T] = Future()
        try:
            done.set_result(task())
        except Exception as error:
            done.set_exception(error)
        return done

    def flush(self) -> None:
        """All is done."""


Tensors = Sequence[Tensor]


class Meeting:
    """Where the messages of one channel meet: the last rank that comes hands them over.

    Args:
        size: how many ranks come.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._here: defaultdict[int, dict[int, tuple[Tensors, Tensors]]] = defaultdict(dict)
        self._num_over = 0

    def come(self, number: int, rank: int, going: Tensors, coming: Tensors) -> None:
        """A rank has sent its part of a message, and has room for those of the others."""
        here = self._here[number]
        here[rank] = going, coming
        if len(here) == self._size:
            _hand_over(self._here.pop(number))
            self._num_over = number + 1  # all ranks send in one order

    def is_over(self, number: int) -> bool:
        """Whether all have come."""
        return number < self._num_over


def _hand_over(here: Mapping[int, tuple[Tensors, Tensors]]) -> None:
    for rank, (_, coming) in here.items():
        for source, (going, _) in here.items():
            if source == rank:
                continue  # the channel keeps it
            if going[rank].nbytes != coming[source].nbytes:
                raise PibrochError(
                    f"{going[rank].nbytes} bytes from rank {source} for rank {rank}",
                    f"the {coming[source].nbytes} that it waits for",
                )
            coming[source].copy_(going[rank])


class _Virtual(Transport):
    """One rank's end of a channel."""

    def __init__(self, ranks: VirtualRanks, meeting: Meeting) -> None:
        self._ranks = ranks
        self._account = ranks.world.account_of(ranks.rank_in_run)
        self._meeting = meeting
        self._num_posted = 0

    def post(self, going: Sequence[Tensor], coming: Sequence[Tensor]) -> Wait:
        """See :class:`Transport`."""
        self._account.post(self._ranks.members, going)
        number = self._num_posted
        self._num_posted += 1
        self._meeting.come(number, self._ranks.rank, going, coming)

        def wait() -> None:
            self._account.begin_to_wait()
            try:
                here = self._ranks.rank_in_run
                self._ranks.world.wait(here, lambda: self._meeting.is_over(number))
            finally:
                self._account.end_to_wait()

        return wait

    def reduce(self, tensor: Tensor) -> Wait:
        """See :class:`Transport`: sums of dense gradients are predicted, and not made."""
        raise PibrochError("a sum of a simulated rank", "messages")

    def close(self) -> None:
        """See :class:`Transport`."""

    device = torch.device("cpu")


class NoNetwork(Transport):
    """For channels that nobody sends over."""

    def post(self, going: Sequence[Tensor], coming: Sequence[Tensor]) -> Wait:
        """See :class:`Transport`."""
        raise PibrochError("a message of a rank that is alone", "none")

    def reduce(self, tensor: Tensor) -> Wait:
        """See :class:`Transport`."""
        raise PibrochError("a sum of a rank that is alone", "none")

    def close(self) -> None:
        """See :class:`Transport`."""
