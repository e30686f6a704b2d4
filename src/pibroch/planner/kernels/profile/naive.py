"""What counting means, in plain NumPy. Shapes as in ``numba.py``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def count(
    batches_of_ids: Sequence[NDArray[np.int64]], num_rows: int
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Accesses to each row, and batches in which it occurs.

    >>> accesses, batches = count([np.array([2, 0, 2]), np.array([2])], 3)
    >>> accesses.tolist(), batches.tolist()
    ([1, 0, 3], [1, 0, 2])
    """
    accesses = np.zeros(num_rows, np.int64)
    batches = np.zeros(num_rows, np.int32)
    for ids in batches_of_ids:
        np.add.at(accesses, ids, 1)
        batches[np.unique(ids)] += 1
    return accesses, batches
