"""When ids of a hashed table expire: by steps, or by event time; never by a clock."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import numpy as np

from pibroch.data.event_clock import EventClock
from pibroch.kernels.arrays import Array, Ints

CHECKS_PER_EXPIRY = 16  # in the age at which an id expires


class Expiry:
    """Says in each step which ids have not been seen for too long.

    Of event time it remembers in which step each of its last spans began; a sixteenth of the age is
    one, and the gap of the :class:`EventClock`.

    Args:
        steps: of age; ``None`` for never.
        seconds: of age, in event time; ``None`` for never.

    Attributes:
        is_wanted: whether ids expire at all.
        span_ms: of event time; 0 where they do not expire by it.
    """

    def __init__(self, steps: int | None, seconds: float | None) -> None:
        self.span_ms = 0 if seconds is None else max(1, int(1000 * seconds) // CHECKS_PER_EXPIRY)
        self.is_wanted = bool(self.span_ms) or steps is not None
        self._steps = steps
        self._clock = EventClock(self.span_ms)
        self._last_step = 0
        # numbers of spans in which there was a step, rising, and the first step of each, of the
        # first span 0; -1 before it
        self._spans = np.full((CHECKS_PER_EXPIRY + 1 if self.span_ms else 0, 2), -1, np.int64)

    def copy(self) -> Expiry:
        """Another one that is now as this is."""
        other = copy.copy(self)
        other._spans = self._spans.copy()
        other._clock = copy.copy(self._clock)
        return other

    @property
    def num_ahead(self) -> int:
        """Records so far whose times were not believed when they came."""
        return self._clock.num_ahead

    def oldest(self, step: int, event_runs: Ints | None) -> int:
        """The first step in which an id that has not expired may have been seen last.

        0 where none is looked for now.

        Args:
            step: that is now.
            event_runs: of event times, of this step, see :func:`pibroch.data.event_clock.runs_of`.
        """
        oldest = 0
        if self._steps is not None and not step % max(1, self._steps // CHECKS_PER_EXPIRY):
            oldest = max(0, step - self._steps + 1)
        if self.span_ms and event_runs is not None:
            has_leapt = self._clock.advance(event_runs, step == self._last_step)
            self._last_step = step
            if self._clock.time is not None:
                # ids of the step before were of this time, too, where time has leapt
                start = step - has_leapt
                oldest = max(oldest, self._oldest_by_time(start, self._clock.time // self.span_ms))
        return oldest

    def _oldest_by_time(self, start: int, span: int) -> int:
        last_span, last_start = self._spans[-1]
        is_first = last_start < 0
        if not is_first and span <= last_span:
            return 0
        self._spans[:-1] = self._spans[1:]
        self._spans[-1] = span, 0 if is_first else start
        is_near = (self._spans[:, 1] >= 0) & (self._spans[:, 0] >= span - CHECKS_PER_EXPIRY)
        return int(self._spans[is_near, 1].min())

    def state(self) -> dict[str, Array]:
        """Arrays by name, as they are; see :meth:`RowIndex.state`."""
        return {"spans": self._spans, "clock": self._clock.state()} if self.span_ms else {}

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Take over a copy of what :meth:`state` gave."""
        if self.span_ms:
            self._spans[:] = state["spans"]
            self._clock.load_state(state["clock"])
