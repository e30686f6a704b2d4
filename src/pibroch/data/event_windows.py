"""Windows of event time, and which of them still take records. Pure bookkeeping.

A window of width w has the records with times from k·w up to (k + 1)·w, in milliseconds since 1970.
The *watermark* is the event time so far (:mod:`pibroch.data.event_clock`). A window is open until
the watermark is at its end or, with some *lateness*, so much beyond. A record counts in the window
of its own event time as long as that is open, in whatever order records come; else it is *late*,
and counts in none.

Example::

    >>> rule = WindowRule(10, 5)
    >>> begins = rule.begins(np.array([3, 12, 25]))
    >>> begins.tolist(), rule.is_over(begins, 25).tolist()
    ([0, 10, 20], [True, True, False])
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.arrays import Ints

NO_TIME = int(np.iinfo(np.int64).min)
"""The watermark before the first record."""


@dataclass(frozen=True, slots=True)
class WindowRule:
    """Which window a record is in, and when it is over.

    Attributes:
        width_ms: of a window, at least 1.
        lateness_ms: for which one stays open after the watermark has passed its end.
    """

    width_ms: int
    lateness_ms: int = 0

    @property
    def most_open(self) -> int:
        """Windows that can be open at a time."""
        return 1 - (-self.lateness_ms // self.width_ms)

    def begins(self, times: Ints) -> Ints:
        """The first millisecond of each time's window."""
        return times // self.width_ms * self.width_ms

    def is_over(self, begins: Ints | int, watermark: Ints | int) -> NDArray[np.bool_]:
        """Whether windows are over at a watermark; one of the two may be a number."""
        ends = np.asarray(begins, np.int64) + (self.width_ms + self.lateness_ms)
        return np.asarray(watermark, np.int64) >= ends
