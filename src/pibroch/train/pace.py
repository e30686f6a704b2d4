"""When something is due that all ranks do at the same step."""

from __future__ import annotations

import time

from pibroch.collectives import Channel

_SOONEST_S = 0.25


class Pace:
    """Every so many seconds, by rank 0's clock, at a step on which all ranks agree.

    Agreeing costs a message, so they agree again when half of the time that is left will have
    passed: some ten messages between two times. Steps of a stream come in bursts, and a burst says
    little of what comes behind it: a step is taken to be half as long as before at least.

    Args:
        control: between the ranks.
        interval_s: may be changed by rank 0 alone at any time.

    Attributes:
        num_agreed: how often they have agreed.
    """

    def __init__(self, control: Channel, interval_s: float) -> None:
        self.interval_s = interval_s
        self._control = control
        self._since = self._looked = time.monotonic()
        self._looked_at: int | None = None
        self._look_at = self.num_agreed = 0
        self._seconds_per_step = 0.0

    def restart(self) -> None:
        """Count from now on."""
        self._since = time.monotonic()

    def is_due(self, step: int, is_ready: bool = True) -> bool:
        """Whether it is to be done after this step; every rank asks after each step.

        Args:
            step: that was trained.
            is_ready: whether this rank could do it now; only where all could it is due.
        """
        if step < self._look_at:
            return False
        now = time.monotonic()
        if self._looked_at is None:  # how long a step takes is not known yet
            self._looked = now
            self._looked_at = step
            self._look_at = step + 1
            return False
        measured = (now - self._looked) / max(1, step - self._looked_at)
        self._seconds_per_step = max(1e-6, measured, self._seconds_per_step / 2)
        left = self._since + self.interval_s - now
        steps = max(
            1, int(max(left / 2, min(_SOONEST_S, self.interval_s / 4)) / self._seconds_per_step)
        )
        reports = self._control.gather([left <= 0, steps, is_ready])
        self._looked = now
        self._looked_at = step
        self._look_at = step + reports[0][1]
        self.num_agreed += 1
        return bool(reports[0][0]) and all(ready for *_, ready in reports)
