"""The order of a lookahead exchange in time, as a state machine: events in, what is due out.

It sends nothing and starts no thread; the training thread alone calls it.

A batch is *read*, then *announced* to all ranks, then, if its feed goes on, *in the window* until
it is looked up; between its lookup and its update it is *in flight*, between that and the end of
the backward pass it is *delivering*: its successor's rows are on their way. A plan follows the
order of the feed; whatever leaves that order closes the window, and from then on batches are looked
up as they come, all records being at home, until the next feed.

::

    read, announce -> in the window -> lookup -> in flight -> update -> delivering -> deliver: the
    next one's turn
                      leave: the window is cleared, and what was in it or in flight is looked up and
                      updated unplanned
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

AHEAD_BYTES = 2 << 30
"""Of the batches that a rank reads ahead, each counted as large as the largest of any rank."""
AHEAD_AT_FIRST = 8
"""Batches that are read before a feed's first step, which is not to wait for all of them."""
MORE_AHEAD_A_STEP = 2
"""How many batches further it is read with each step, until it is as far as wanted."""


class FedBatch(Protocol):
    """What the window must know of a batch.

    Attributes:
        number: among the steps that the oracle was given, from 1.
    """

    number: int

    @property
    def batch(self) -> object:
        """As the feed handed it out."""

    @property
    def feed(self) -> int:
        """Number of its feed."""


S = TypeVar("S", bound=FedBatch)


class FeedWindow(Generic[S]):
    """Where all batches are on their way.

    Args:
        lookahead: steps beyond the current one that the oracle should know.

    Attributes:
        feed: whose batches are planned; ``None`` when none are.
        is_open: whether records are where the oracle thinks.
        in_flight: a planned step that was looked up, and not updated.

    Example:
        >>> from types import SimpleNamespace
        >>> window, feed = FeedWindow(lookahead=1), 1
        >>> window.begin_feed()
        1
        >>> batches = ["one", "another"]
        >>> for batch in batches:
        ...     window.read(SimpleNamespace(batch=batch, feed=feed, number=0))
        >>> [window.admit(step) for step in window.take_read()]
        [True, True]
        >>> step = window.take(batches[0])
        >>> window.open(), window.num_known(step, 1)
        (True, 2)
        >>> window.fly(step)
        >>> window.update(step), window.finish(step), window.deliver().batch
        (True, None, 'one')
        >>> window.following().batch
        'another'
    """

    def __init__(self, lookahead: int) -> None:
        self.lookahead = lookahead
        self.feed: int | None = None
        self.is_open = False
        self.in_flight: S | None = None
        self._read: list[S] = []
        self._steps: deque[S] = deque()
        self._delivering: S | None = None
        self._num_feeds = self._num_admitted = 0
        self._is_dirty = False

    def begin_feed(self) -> int:
        """A feed begins, the one before was left; returns its number."""
        self._num_feeds += 1
        self.feed = self._num_feeds
        return self._num_feeds

    def read(self, step: S) -> None:
        """A batch was read: it is announced when there is time for it."""
        self._read.append(step)

    def take_read(self) -> list[S]:
        """The batches to announce, in their order."""
        read = self._read
        self._read = []
        return read

    def admit(self, step: S) -> bool:
        """Take an announced batch into the window if its feed goes on.

        Returns whether it did; then the oracle must get the step as well.
        """
        if step.feed != self.feed:
            return False
        self._num_admitted += 1
        step.number = self._num_admitted
        self._steps.append(step)
        return True

    def take(self, batch: object) -> S | None:
        """A batch is looked up to be trained on.

        Returns its step if it is the next in the window and none is in flight.
        """
        if self.in_flight is None and self._steps and self._steps[0].batch is batch:
            return self._steps.popleft()
        return None

    def open(self) -> bool:
        """A step's rows are to be read.

        Returns whether the window opens by that: then they must be fetched first.
        """
        opens = not self.is_open
        self.is_open = True
        return opens

    def fly(self, step: S) -> None:
        """A planned step was looked up."""
        self.in_flight = step

    def update(self, step: S) -> bool:
        """A step's gradients are there.

        Returns whether they go as planned, and the plan was not left meanwhile.
        """
        if step is not self.in_flight:
            return False
        self.in_flight = None
        return True

    def finish(self, step: S) -> None:
        """A step is updated as planned: the rest of its plan is due when the backward pass ends."""
        self._is_dirty = True
        self._delivering = step

    def deliver(self) -> S | None:
        """A backward pass ends: the step whose plan goes on now, if there is one."""
        step = self._delivering
        self._delivering = None
        return step

    def following(self) -> S | None:
        """The next step in the window."""
        return self._steps[0] if self._steps else None

    def upcoming(self) -> tuple[S, ...]:
        """The next two steps in the window, or fewer: those for which rows are sent now."""
        return tuple(self._steps)[:2]

    def num_known(self, step: S, num_steps: int) -> int:
        """How many steps the oracle has been given by some point of the window.

        That is with ``step`` and the first ``num_steps`` of the window, or all of it.
        """
        if not self._steps:
            return step.number
        return self._steps[min(num_steps, len(self._steps)) - 1].number

    def leave(self) -> bool:
        """Leave the plan, after what was read has been announced.

        Returns whether there was one: then caches must be cleared.
        """
        self._steps.clear()
        self.feed = self.in_flight = None
        was_open = self.is_open
        self.is_open = False
        return was_open

    def forget_numbers(self) -> None:
        """Number the steps to come from 1 again, for a new oracle."""
        self._num_admitted = 0

    def must_write_home(self) -> bool:
        """Whether homes, which are to be read, lack updates; the caller writes these home."""
        is_dirty = self._is_dirty
        self._is_dirty = False
        return is_dirty


class Reach:
    """How many batches to read ahead; all ranks compute the same number.

    Args:
        most: batches to read ahead at most.
        at_first: before the first step.

    Example:
        >>> reach = Reach(9)
        >>> reach.steps
        8
        >>> reach.step_begins()
        >>> reach.steps
        9
        >>> reach.batch_takes(AHEAD_BYTES // 3)
        >>> reach.steps
        3
    """

    def __init__(self, most: int, at_first: int = AHEAD_AT_FIRST) -> None:
        self._most = most
        self.steps = min(at_first, most)

    def step_begins(self) -> None:
        """A batch was handed out."""
        self.steps = min(self.steps + MORE_AHEAD_A_STEP, self._most)

    def batch_takes(self, num_bytes: int) -> None:
        """Some rank's batch takes ``num_bytes``: read only as many as fit, but at least one."""
        self._most = min(self._most, max(1, AHEAD_BYTES // max(1, num_bytes)))
        self.steps = min(self.steps, self._most)
