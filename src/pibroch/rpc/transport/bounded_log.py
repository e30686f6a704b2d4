"""Lines in the log that strangers and peers cause: not more of them than somebody may want to read."""

from __future__ import annotations

import logging
import time


class BoundedLog:
    """Lines of one sort, at a bounded rate: who causes them may cause any number.

    Args:
        log: where they go.
        at_once: how many may come at once,
        per_s: and then per second; how many were left out is said in the next one.

    >>> lines = BoundedLog(logging.getLogger(), at_once=1, per_s=1e-9)
    >>> lines.wants_one(0.0), lines.wants_one(1.0), lines.num_left_out
    (True, False, 1)
    """

    def __init__(self, log: logging.Logger, at_once: int = 20, per_s: float = 1.0) -> None:
        self._log = log
        self._at_once = at_once
        self._per_s = per_s
        self._allowance = float(at_once)
        self._last = 0.0
        self.num_left_out = 0

    def wants_one(self, now: float) -> bool:
        """Whether one more is to be written at this time (monotonic, in seconds)."""
        self._allowance = min(self._at_once, self._allowance + (now - self._last) * self._per_s)
        self._last = now
        if self._allowance < 1:
            self.num_left_out += 1
            return False
        self._allowance -= 1
        return True

    def write(self, level: int, text: str, *args: object, exc_info: bool = False) -> None:
        """Log it, unless there were too many."""
        if not self._log.isEnabledFor(level) or not self.wants_one(time.monotonic()):
            return
        left_out = self.num_left_out
        self.num_left_out = 0
        if left_out:
            text = f"{text} (and %d more before it)"
            args = (*args, left_out)
        self._log.log(level, text, *args, exc_info=exc_info)
