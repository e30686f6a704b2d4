"""The skew of accesses to each Criteo table, and distributions as skewed for any size.

The figures were measured on a 0.3 % uniform sample of the Criteo Kaggle log (137,139 rows): for
each of C1 to C26 the number of distinct values and the share of accesses that go to the most
frequent one, 0.1 % and 1 % of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Skew:
    """A feature's distinct values, and shares of accesses to the top one, 0.1 % and 1 %."""

    num_values: int
    top_value: float
    top_permille: float
    top_percent: float


CRITEO_SKEW = (
    Skew(616, 0.5004, 0.5004, 0.8579),
    Skew(528, 0.1135, 0.1135, 0.2665),
    Skew(61764, 0.0345, 0.2621, 0.4350),
    Skew(32223, 0.0358, 0.2969, 0.5268),
    Skew(154, 0.6742, 0.6742, 0.8286),
    Skew(12, 0.3962, 0.3962, 0.3962),
    Skew(8634, 0.0212, 0.0822, 0.2591),
    Skew(292, 0.5949, 0.5949, 0.8345),
    Skew(3, 0.9000, 0.9000, 0.9000),
    Skew(13982, 0.2221, 0.2916, 0.4566),
    Skew(4087, 0.0320, 0.0815, 0.2711),
    Skew(56397, 0.0345, 0.2792, 0.4624),
    Skew(2944, 0.0320, 0.0724, 0.2608),
    Skew(26, 0.3491, 0.3491, 0.3491),
    Skew(5897, 0.0155, 0.0603, 0.3123),
    Skew(46382, 0.0345, 0.2874, 0.4964),
    Skew(10, 0.4602, 0.4602, 0.4602),
    Skew(2827, 0.0320, 0.0871, 0.3601),
    Skew(1342, 0.4418, 0.4418, 0.8517),
    Skew(4, 0.4418, 0.4418, 0.4418),
    Skew(52250, 0.0345, 0.2850, 0.4798),
    Skew(13, 0.7613, 0.7613, 0.7613),
    Skew(14, 0.4374, 0.4374, 0.4374),
    Skew(14596, 0.0529, 0.3736, 0.6143),
    Skew(55, 0.4418, 0.4418, 0.4418),
    Skew(11139, 0.4418, 0.5864, 0.7188),
)


def rank_probabilities(skew: Skew, num_rows: int) -> NDArray[np.float64]:
    """Probability of each rank, falling, float64 ``[num_rows]``.

    The cumulative share is a power of the rank between the measured points (rank 1, 0.1 %, 1 %, 100
    %), so that each stretch is a Zipf law with its own exponent and the measured shares hold
    exactly at any table size. Points closer than one rank are dropped.

    >>> rank_probabilities(Skew(1000, 0.2, 0.2, 0.5), 1000)[:10].sum().round(6)
    np.float64(0.5)
    """
    points = {1: skew.top_value}
    for rank, share in ((num_rows / 1000, skew.top_permille), (num_rows / 100, skew.top_percent)):
        if round(rank) > max(points) and share > max(points.values()):
            points[round(rank)] = share
    if num_rows > max(points):
        points[num_rows] = 1.0
    ranks = np.log(np.arange(1, num_rows + 1))
    cumulative = np.exp(np.interp(ranks, np.log(list(points)), np.log(list(points.values()))))
    probabilities = np.sort(np.diff(cumulative, prepend=0.0))[::-1]
    normalised: NDArray[np.float64] = probabilities / probabilities.sum()
    return normalised
