"""What the partition kernels mean, row by row.

Shapes as in :mod:`pibroch.planner.kernels.partition.numba`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def partition(accesses: NDArray[np.int64], max_accesses: float, max_rows: int) -> NDArray[np.int64]:
    """The partition of each row.

    Rows by falling count, a new partition where one more row would pass a bound.

    A row that passes the bound on accesses by itself is a partition. Rows of equal counts keep
    their order.

    >>> partition(np.array([1, 9, 1, 3, 1, 0]), 4, 3).tolist()
    [1, 0, 2, 1, 2, 2]
    """
    out = np.empty(len(accesses), np.int64)
    number = 0
    rows = 0
    sum_ = 0
    for row in np.argsort(-accesses, kind="stable"):
        if rows and (rows + 1 > max_rows or sum_ + accesses[row] > max_accesses):
            number = number + 1
            rows = 0
            sum_ = 0
        out[row] = number
        rows = rows + 1
        sum_ = sum_ + accesses[row]
    return out
