"""A limit on the rate of log lines that peers and strangers can cause."""

from __future__ import annotations

import logging
import time


class BoundedLog:
    """Log lines of one kind, at a bounded rate (a token bucket).

    A line that follows dropped ones says how many were dropped.

    Args:
        log: where they go.
        at_once: how many may be written at once.
        per_s: how many per second after that.

    >>> lines = BoundedLog(logging.getLogger(), at_once=1, per_s=1e-9)
    >>> lines.take(0.0), lines.take(1.0), lines.num_dropped
    (True, False, 1)
    """

    def __init__(self, log: logging.Logger, at_once: int = 20, per_s: float = 1.0) -> None:
        self._log = log
        self._at_once = at_once
        self._per_s = per_s
        self._allowance = float(at_once)
        self._last = 0.0
        self.num_dropped = 0

    def take(self, now: float) -> bool:
        """Whether one more line may be written at ``now`` (``time.monotonic()``), and count it."""
        self._allowance = min(self._at_once, self._allowance + (now - self._last) * self._per_s)
        self._last = now
        if self._allowance < 1:
            self.num_dropped += 1
            return False
        self._allowance -= 1
        return True

    def write(self, level: int, text: str, *args: object, exc_info: bool = False) -> None:
        """Log a line, unless there were too many lately."""
        if not self._log.isEnabledFor(level) or not self.take(time.monotonic()):
            return
        num_dropped = self.num_dropped
        self.num_dropped = 0
        if num_dropped:
            text = f"{text} (and %d more before it)"
            args = (*args, num_dropped)
        self._log.log(level, text, *args, exc_info=exc_info)
