"""A step that the oracle has taken into its window, as the touches that it has there."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pibroch.kernels.window.rules import Places


@dataclass(slots=True)
class WindowStep:
    """A step in the window.

    Attributes:
        number: of its first touch.
        begin: index of its first touch in the ring.
        end: index behind its last one.
        mine: touches of this rank, in the order of its rows.
        fresh: touches that the step before has not.
        again: those that it has.
        here: touches that concern this rank, of those that have arrived.
        is_begun: whether the fresh ones have arrived.
    """

    number: int
    begin: int
    end: int
    mine: Places
    fresh: Places
    again: Places
    here: Places = field(default_factory=lambda: np.empty(0, np.int32))
    is_begun: bool = False

    def shift(self, by: int) -> None:
        """The touches lie ``by`` further in a larger ring."""
        self.begin = self.begin + by
        self.end = self.end + by
        self.mine, self.fresh, self.again, self.here = (
            each + np.int32(by) for each in (self.mine, self.fresh, self.again, self.here)
        )
