"""Whether, and when, to start again what was lost."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pibroch.launch.job import Restarts

LONGEST_PAUSE_S = 30.0


@dataclass(slots=True)
class RestartBudget:
    """What is left of the restarts of one process, or of all; later where nothing was gained.

    >>> budget, now = RestartBudget(Restarts(most=3)), 0.0
    >>> [budget.pause(now, step) for step in (5, 5, 5, 9)]
    [0.0, 1.0, 2.0, None]
    >>> budget.pause(now + budget.restarts.within_s + 1, 9)
    1.0
    """

    restarts: Restarts
    vain: int = 0
    """Restarts in turn that brought no new checkpoint or cut."""
    _times: deque[float] = field(default_factory=deque)
    _step: int | None = None

    def pause(self, now: float, step: int | None = None) -> float | None:
        """Seconds to wait before the next start; ``None`` when no more are left.

        Args:
            now: monotonic seconds.
            step: from which a run goes on; ``None`` where nothing is trained again.
        """
        while self._times and now - self._times[0] > self.restarts.within_s:
            self._times.popleft()
        self.vain = self.vain + 1 if step is not None and step == self._step else 0
        self._step = step
        if len(self._times) >= self.restarts.most:
            return None
        self._times.append(now)
        return min(LONGEST_PAUSE_S, 2.0 ** (self.vain - 1)) if self.vain else 0.0
