"""What the ranks' own times of some steps say.

How long all steps take together under a bound, which bound is worth its memory, and whether one
rank is always slow. Pure.

Shape legend: S steps, W ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BOUNDS = (1, 2, 4, 8)
"""Among which is chosen."""
TOLERATED_SHARE = 0.02
"""Of a step, by which a smaller bound may be slower than the largest one."""
LEAST_EXCESS_SHARE = 0.1
LEAST_STANDARD_ERRORS = 4.0
"""How far a rank's mean must exceed every other's to count as always slow.

Below that it was unlucky in these steps.
"""


class Straggler(NamedTuple):
    """A rank that sets the pace for every bound.

    Attributes:
        rank: which one.
        seconds: its own time of a step, mean.
        next_seconds: that of the slowest of the others.
    """

    rank: int
    seconds: float
    next_seconds: float


def total_time(delays: NDArray[np.float64], bound: int) -> float:
    """The time until all ranks have completed all requests, if only waiting took time.

    With bound k a rank's request j begins after its own delay and, as at most k may be outstanding,
    after request j - k is complete: when the slowest rank has begun it. With k = 0 a step ends when
    the slowest rank has begun it. Sums and maxima, so the recursion is linear in the (max, +)
    algebra.

    Args:
        delays: of each request on each rank, ``[S, W]``; the result has their unit.
        bound: k.

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


def choose_bound(times: NDArray[np.float64]) -> int:
    """The smallest bound with which waiting takes hardly longer than with the largest one.

    Args:
        times: seconds ``[S, W]`` that each rank needs for each step on its own.

    >>> draw = np.random.default_rng(0)
    >>> choose_bound(np.full((64, 4), 0.005)), choose_bound(draw.uniform(0, 0.01, (64, 4)))
    (1, 4)
    """
    # the model of waiting alone: what transport takes is the same for all bounds
    totals = {bound: total_time(times, bound) for bound in BOUNDS}
    # each unit of the bound costs slots, and a step of age of what is read
    enough = (1.0 + TOLERATED_SHARE) * totals[BOUNDS[-1]]
    return next(bound for bound in BOUNDS if totals[bound] <= enough)


def find_straggler(times: NDArray[np.float64]) -> Straggler | None:
    """The rank that is slower than all others, by more than chance, if there is one.

    >>> find_straggler(np.array([[0.005, 0.012], [0.006, 0.011], [0.005, 0.013]])).rank
    1
    """
    num_steps, num_ranks = times.shape
    if num_ranks < 2 or num_steps < 2:
        return None
    # a rank slow by chance in these steps is no straggler: ask for several standard errors
    means = times.mean(0)
    errors = times.var(0, ddof=1) / num_steps
    second, first = (int(rank) for rank in np.argsort(means, kind="stable")[-2:])
    excess = means[first] - means[second]
    chance = np.sqrt(errors[first] + errors[second])
    if excess <= LEAST_EXCESS_SHARE * means[second] or excess <= LEAST_STANDARD_ERRORS * chance:
        return None
    return Straggler(first, float(means[first]), float(means[second]))
