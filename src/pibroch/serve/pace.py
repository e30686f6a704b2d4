"""How fast each rank of a pipeline is by itself; all ranks know it without more messages.

Each question carries the time that its sender took for the step before without waiting for others.
When a request is complete, every rank has all questions up to it, so all ranks have the same times
then, and draw the same conclusions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np

from pibroch.collectives.bounded_lag.jitter import Straggler, choose_bound, find_straggler

logger = logging.getLogger(__name__)
NUM_FIRST = 16
NUM_STEPS = 64
"""Steps that are left out while kernels compile, and steps between two decisions."""


class StepPace:
    """See the module.

    Args:
        rank: this one.
        members: the ranks by their numbers in the run.
        most_ahead: requests that may be on their way, at most.

    Attributes:
        straggler: of the last steps, if one rank was always slow; by its number in the run.
    """

    def __init__(self, rank: int, members: Sequence[int], most_ahead: int) -> None:
        self._rank = rank
        self._members = members
        # seconds, of the last steps
        self._times = np.zeros((NUM_STEPS + most_ahead + 1, len(members)))
        self._since = time.perf_counter()
        self._waited = 0.0
        self._has_warned = False
        self.straggler: Straggler | None = None

    def begins(self, number: int) -> int:
        """A step begins here; nanoseconds that the one before took this rank on its own."""
        now = time.perf_counter()
        own = max(0, int(1e9 * (now - self._since - self._waited)))
        self._since = now
        self._waited = 0.0
        self.took(number, self._rank, own)
        return own

    def took(self, number: int, rank: int, nanoseconds: int) -> None:
        """What the question of a rank says."""
        self._times[number % len(self._times), rank] = 1e-9 * nanoseconds

    def waited(self, seconds: float) -> None:
        """This rank was blocked."""
        self._waited += seconds

    def completed(self, number: int) -> int | None:
        """Count a complete request; return the best bound for the last steps when it is due.

        It is due at the same numbers of requests on all ranks.
        """
        since_first = number + 1 - NUM_FIRST
        if since_first <= 0 or since_first % NUM_STEPS:
            return None
        times = self._times[np.arange(number + 1 - NUM_STEPS, number + 1) % len(self._times)]
        straggler = find_straggler(times)
        self.straggler = (
            None if straggler is None else straggler._replace(rank=self._members[straggler.rank])
        )
        if self.straggler is not None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "rank %d is always slow: %.2f ms a step by itself, the next slowest %.2f ms. No"
                " bound hides that: give it less to do, or look at its machine",
                self.straggler.rank,
                1e3 * self.straggler.seconds,
                1e3 * self.straggler.next_seconds,
            )
        return choose_bound(times)
