"""The lag window: which request uses which slot, and what must be complete before it.

Pure: events in, instructions out. A rank sends its part of request j into slot ``j % num_slots`` of
every rank, and request j is complete here when every rank's part has arrived and was read. With a
bound k, at most k requests are outstanding.

Why twice as many slots. Differs from the paper, which has k: that B's part of request j - k arrived
at A says that B *sent* it, not that B *read* what A had sent for it. B sent it after it had
completed, and so read, request j - 2k. So with 2k slots A may overwrite the slot of j - 2k; with k
it overwrites what B may still have to read. No acknowledgement travels.
"""

from __future__ import annotations

from dataclasses import dataclass

from pibroch.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Put:
    """Send this rank's part of a request into a slot of every rank."""

    number: int
    slot: int


@dataclass(frozen=True, slots=True)
class Complete:
    """Wait for all ranks' parts of a request, and read them out of their slot."""

    number: int
    slot: int


Instruction = Put | Complete


class LagWindow:
    """The requests of one rank, in their order.

    Instructions are carried out one by one, in the order given.

    >>> window = LagWindow(1)
    >>> window.initiate()
    [Put(number=0, slot=0)]
    >>> window.initiate()
    [Complete(number=0, slot=0), Put(number=1, slot=1)]
    >>> window.wait(1), window.wait(0)
    ([Complete(number=1, slot=1)], [])
    >>> LagWindow(0).initiate()
    [Put(number=0, slot=0), Complete(number=0, slot=0)]

    Args:
        bound: k, requests that may be outstanding when an initiation returns. 0 is an ordinary
            all-to-all, which completes inside its initiation and needs two slots, as 1 does.
        most: the largest bound that :meth:`rebound` may ask for later; ``bound`` when that is
            larger.

    Attributes:
        num_slots: two for each unit of the larger of k and 1, see above.
        num_initiated, num_completed: requests so far; those in between are outstanding.

    Raises:
        ConfigError: for a negative bound.
    """

    def __init__(self, bound: int, most: int = 0) -> None:
        if bound < 0:
            raise ConfigError(f"a lag bound of {bound}", "0 or more", "0 is an ordinary all-to-all")
        self._most = max(bound, most, 1)
        self.bound = bound
        # of the largest bound: slots are memory that peers have mapped, and stay
        self.num_slots = 2 * self._most
        self.num_initiated = 0
        self.num_completed = 0

    @property
    def num_outstanding(self) -> int:
        """Requests that were initiated and are not complete."""
        return self.num_initiated - self.num_completed

    def initiate(self) -> list[Instruction]:
        """A request begins. It has the number :attr:`num_initiated` had before."""
        number = self.num_initiated
        instructions: list[Instruction] = []
        # more than one when the bound was lowered since
        while self.num_outstanding >= max(self.bound, 1):
            instructions.append(self._complete_oldest())
        self.num_initiated += 1
        # after the completions, by which the slot is free on all ranks, see the module
        instructions.append(Put(number, number % self.num_slots))
        # an ordinary all-to-all: complete before it returns
        if self.bound == 0:
            instructions.append(self._complete_oldest())
        return instructions

    def rebound(self, bound: int) -> None:
        """Change the bound from the next event on, up to the largest one.

        Other ranks may change theirs at other times.

        A rank is then ahead of another by up to the larger of the two's. Slots are those of the
        largest bound, under which every smaller one is safe.

        Raises:
            ConfigError: for a bound that has no slots.
        """
        if not 0 <= bound <= self._most:
            raise ConfigError(
                f"a lag bound of {bound}", f"0 to {self._most}, for which there are slots"
            )
        self.bound = bound

    def initiate_alone(self) -> int:
        """A request begins while none is outstanding, and is complete when the next event comes.

        Returns its number.
        """
        assert not self.num_outstanding
        number = self.num_initiated
        self.num_initiated = self.num_completed = number + 1
        return number

    def wait(self, number: int) -> list[Complete]:
        """Somebody waits for a request: it completes, with all before it.

        Nothing happens if it is complete.

        Raises:
            ConfigError: for a request that was not initiated.
        """
        if number >= self.num_initiated:
            raise ConfigError(
                f"a wait for request {number} of {self.num_initiated}", "one that was initiated"
            )
        # in their order, as on every other rank
        return [self._complete_oldest() for _ in range(self.num_completed, number + 1)]

    def _complete_oldest(self) -> Complete:
        number = self.num_completed
        self.num_completed += 1
        return Complete(number, number % self.num_slots)
