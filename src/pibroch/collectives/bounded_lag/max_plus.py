"""How long ranks with given delays take together, if nothing but waiting for each other took time.

With bound k a rank's request j begins after its own delay and, as at most k may be outstanding,
after request j - k is complete: when the slowest rank has begun it. With k = 0 a step ends when the
slowest rank has begun it. Sums and maxima, so the recursion is linear in the (max, +) algebra.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def total_time(delays: NDArray[np.float64], bound: int) -> float:
    """The time until all ranks have completed all requests, in the unit of ``delays``.

    Those are ``[steps, ranks]``.

    >>> delays = np.array([[1.0, 3.0], [3.0, 1.0]])
    >>> total_time(delays, 0), total_time(delays, 2)
    (6.0, 4.0)
    """
    num_steps, num_ranks = delays.shape
    free = np.zeros(num_ranks)  # when each rank can go on
    complete: list[float] = []
    for step in range(num_steps):
        begun = free + delays[step]
        # Eq.: begun[j] = max(free + delay, complete[j - k])
        if bound and step >= bound:
            begun = np.maximum(begun, complete[step - bound])
        complete.append(float(begun.max()))
        free = begun if bound else np.full(num_ranks, complete[-1])
    return max(complete, default=0.0)


def removed(
    times: dict[int, float], delays: NDArray[np.float64], bounds: Sequence[int]
) -> dict[int, float]:
    """The share of the gap between synchronous and mean-delay time that each bound removes.

    ``times`` has 0, too.
    """
    mean = float(delays.sum(0).max())
    gap = times[0] - mean
    return {bound: (times[0] - times[bound]) / gap for bound in bounds}
