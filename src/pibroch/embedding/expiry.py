"""When ids of a hashed table expire: by steps, or by event time; never by a clock."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import numpy as np

from pibroch.kernels.arrays import Array

CHECKS_PER_EXPIRY = 16  # in the age at which an id expires


class Expiry:
    """Says in each step which ids have not been seen for too long.

    Of event time it remembers in which step each of its last spans began; a sixteenth of the age is
    one.

    Args:
        steps: of age; ``None`` for never.
        seconds: of age, in event time; ``None`` for never.

    Attributes:
        is_timed: whether ids expire by event time.
        is_wanted: whether they expire at all.
    """

    def __init__(self, steps: int | None, seconds: float | None) -> None:
        self.is_timed = seconds is not None
        self.is_wanted = self.is_timed or steps is not None
        self._steps = steps
        self._span = 0 if seconds is None else max(1, int(1000 * seconds) // CHECKS_PER_EXPIRY)
        # numbers of spans in which there was a step, rising, and the first step of each, of the
        # first span 0; -1 before it
        self._spans = np.full((CHECKS_PER_EXPIRY + 1 if self._span else 0, 2), -1, np.int64)

    def copy(self) -> Expiry:
        """Another one that is now as this is."""
        other = copy.copy(self)
        other._spans = self._spans.copy()
        return other

    def oldest(self, step: int, event_time: int | None) -> int:
        """The first step in which an id that has not expired may have been seen last.

        0 where none is looked for now.

        Args:
            step: that is now.
            event_time: the greatest of this step, in milliseconds.
        """
        oldest = 0
        if self._steps is not None and not step % max(1, self._steps // CHECKS_PER_EXPIRY):
            oldest = max(0, step - self._steps + 1)
        if self._span and event_time is not None:
            oldest = max(oldest, self._oldest_by_time(step, event_time // self._span))
        return oldest

    def _oldest_by_time(self, step: int, span: int) -> int:
        last_span, last_start = self._spans[-1]
        is_first = last_start < 0
        if not is_first and span <= last_span:
            return 0
        self._spans[:-1] = self._spans[1:]
        self._spans[-1] = span, 0 if is_first else step
        is_near = (self._spans[:, 1] >= 0) & (self._spans[:, 0] >= span - CHECKS_PER_EXPIRY)
        return int(self._spans[is_near, 1].min())

    def state(self) -> dict[str, Array]:
        """Arrays by name, as they are; see :meth:`RowIndex.state`."""
        return {"spans": self._spans} if self._span else {}

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Take over a copy of what :meth:`state` gave."""
        if self._span:
            self._spans[:] = state["spans"]
