"""Which evaluation was the best, when to lower the learning rate, when to stop.

Pure bookkeeping.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Monitor:
    """Follows one metric over a run; a checkpoint carries it.

    >>> monitor = Monitor()
    >>> [monitor.update(step, value) for step, value in [(10, 0.7), (20, 0.8), (30, 0.75)]]
    [True, True, False]
    >>> monitor.best_step, monitor.evaluations_since_best
    (20, 1)

    Attributes:
        best_step: step of the best evaluation, ``None`` before the first.
        best_value: its value; higher is better.
        evaluations_since_best: how many came after it.
        plateaus: evaluations without improvement in all.
    """

    best_step: int | None = None
    best_value: float | None = None
    evaluations_since_best: int = 0
    plateaus: int = 0

    def update(self, step: int, value: float) -> bool:
        """Take an evaluation's value, higher being better; says whether it is the best so far.

        NaN says nothing: it is neither an improvement nor the lack of one.
        """
        if math.isnan(value):
            return False
        if self.best_value is None or value > self.best_value:
            self.best_step = step
            self.best_value = value
            self.evaluations_since_best = 0
            return True
        self.evaluations_since_best += 1
        self.plateaus += 1
        return False

    def is_exhausted(self, patience: int | None) -> bool:
        """Whether ``patience`` evaluations in a row brought nothing."""
        return patience is not None and self.evaluations_since_best >= patience
