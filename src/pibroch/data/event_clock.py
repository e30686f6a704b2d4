"""Event time as steps move it, which one record with a wrong clock does not. Pure bookkeeping.

Event times of a step that follow one another within a *gap* are a *run*, and a step is known by its
runs: first time, last time, number of records. Runs of parts of a step merge into those of the
whole, so nothing depends on how ranks share it. With each step:

1. Time moves to the end of the run that begins within a gap of it. Runs beyond are *ahead*.
2. Where the run of the step's median is ahead, more than half of its records say that time
   has leapt to its end. It does once the next step says so, too, and then to the lesser of both.

So a stream that was silent for a week is followed one step later, and a few records a year ahead
are not.

Example::

    >>> clock = EventClock(10)
    >>> for times in ([100, 105], [112, 9000], [9000], [118], [500, 501], [502, 503, 3]):
    ...     _ = clock.advance(runs_of(np.array(times), 10))
    ...     print(clock.time, end=" ")
    None 112 112 118 118 503
"""

from __future__ import annotations

import numpy as np

from pibroch.data.event_windows import NO_TIME
from pibroch.kernels.arrays import Array, Ints

_LONGEST_GAP = 1 << 62


def runs_of(times: Ints, gap: int) -> Ints:
    """The runs of some times, rising: first, last and number of each, int64 ``[R, 3]``."""
    if not len(times):
        return np.empty((0, 3), np.int64)
    first = int(times.min())
    last = int(times.max())
    if last - first <= gap:
        return np.array([[first, last, len(times)]])
    return merged(np.stack([times, times, np.ones_like(times)], 1), gap)


def merged(runs: Ints, gap: int) -> Ints:
    """The runs of all records of some runs, with this gap or a shorter one, in any order."""
    if len(runs) < 2:
        return runs
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    firsts = runs[1:, 0]
    ends = np.maximum.accumulate(runs[:, 1])[:-1]
    distances = (firsts - ends).view(np.uint64)  # exact where firsts are greater
    is_apart = (firsts > ends) & (distances > np.uint64(min(gap, _LONGEST_GAP)))
    starts = np.concatenate([[0], np.flatnonzero(is_apart) + 1])
    return np.stack(
        [
            runs[starts, 0],
            np.maximum.reduceat(runs[:, 1], starts),
            np.add.reduceat(runs[:, 2], starts),
        ],
        1,
    )


class EventClock:
    """The event time of a run of steps.

    Args:
        gap: milliseconds; see above.
        trusts_first: whether the first step says what time it is. Otherwise the second one does,
            with it.

    Attributes:
        time: milliseconds since 1970; ``None`` while it is not known.
        num_ahead: records so far that were ahead in their step.
    """

    def __init__(self, gap: int, trusts_first: bool = False) -> None:
        self.time: int | None = None
        self.num_ahead = 0
        self._gap = gap
        self._trusts_first = trusts_first
        self._leap: int | None = None  # where the last step says that time is

    def advance(self, runs: Ints, same_step: bool = False) -> bool:
        """Take the runs of a step.

        Args:
            runs: see :func:`runs_of`; with this gap, or a shorter one.
            same_step: these are more records of the last step, which cannot confirm it.

        Returns:
            Whether time has leapt, to where the step before was already.
        """
        runs = merged(runs, self._gap)
        if not len(runs):
            return False
        if len(runs) == 1 and self.time is not None and self._leap is None:  # nearly always
            first, last, _ = runs[0].tolist()
            if first <= self.time + self._gap:
                self.time = max(self.time, last)
                return False
        ends = np.cumsum(runs[:, 2])
        median_run = int(np.searchsorted(ends, (int(ends[-1]) - 1) // 2, side="right"))
        majority = int(runs[median_run, 1])
        if self.time is None and self._trusts_first:
            self.time = majority
        num_reached = self._reach(runs)
        has_leapt = False
        if not same_step:
            leap = self._leap
            if leap is not None and self._is_ahead(majority):
                leap = min(leap, majority)
                if has_leapt := self._is_ahead(leap):
                    self.time = leap
                    num_reached = self._reach(runs)
            self._leap = majority if self._is_ahead(majority) else None
        if self.time is not None:
            self.num_ahead += int(runs[num_reached:, 2].sum())
        return has_leapt

    def state(self) -> Array:
        """What goes on, int64 ``[3]``."""
        times = [NO_TIME if each is None else each for each in (self.time, self._leap)]
        return np.array([*times, self.num_ahead])

    def load_state(self, state: Array) -> None:
        """The inverse."""
        time, leap, self.num_ahead = state.tolist()
        self.time, self._leap = (None if each == NO_TIME else each for each in (time, leap))

    def _is_ahead(self, time: int) -> bool:
        return self.time is None or time > self.time

    def _reach(self, runs: Ints) -> int:
        """Move on to the end of the last run that is near; how many runs are not ahead."""
        if self.time is None:
            return 0
        limit = min(self.time + self._gap, np.iinfo(np.int64).max)
        num = int(np.searchsorted(runs[:, 0], limit, side="right"))
        if num:
            self.time = max(self.time, int(runs[num - 1, 1]))
        return num
