"""Time spent in training steps: evaluation, saving and the compiling first step do not count."""

from __future__ import annotations

import time


class Stopwatch:
    """Counts seconds and samples of the steps between ``start`` and ``pause``.

    Args:
        seconds_before: of earlier processes of the same run.
    """

    def __init__(self, seconds_before: float = 0.0) -> None:
        self.seconds_before = seconds_before
        self._seconds = 0.0
        self._samples = 0
        self._started: float | None = None

    def start(self) -> None:
        """Go on counting."""
        if self._started is None:
            self._started = time.perf_counter()

    def pause(self) -> None:
        """Stop counting until the next ``start``."""
        if self._started is not None:
            self._seconds += time.perf_counter() - self._started
            self._started = None

    def add(self, samples: int) -> None:
        """Count samples, when running."""
        if self._started is not None:
            self._samples += samples

    def read(self) -> tuple[float, int]:
        """Seconds and samples of this process so far."""
        running = 0.0 if self._started is None else time.perf_counter() - self._started
        return self._seconds + running, self._samples
