"""Homes of single rows: a row's number among those of its table at the same place.

N rows of a table, P partitions, S + 1 places: the shards, and "everywhere".
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.policy import kernel


@kernel
def number_rows(
    partition: NDArray[np.uint16],
    place_of: NDArray[np.int64],
    counts: NDArray[np.int64],
    index: NDArray[np.uint32],
) -> int:
    """Write each row's number at the place of its partition to ``index`` ``[N]``.

    Rows are counted in ``counts`` ``[S + 1]``.

    Args:
        partition: ``[N]``.
        place_of: ``[P]``.
        counts: 0 at first.
        index: is written to.

    Returns:
        The first row of an unknown partition, or -1.
    """
    for row in range(len(partition)):
        group = np.int64(partition[row])
        if group >= len(place_of):
            return row
        place = place_of[group]
        index[row] = counts[place]
        counts[place] += 1
    return -1


@kernel
def check_numbers(
    partition: NDArray[np.uint16],
    place_of: NDArray[np.int64],
    counts: NDArray[np.int64],
    index: NDArray[np.uint32],
) -> int:
    """As :func:`number_rows`, but compare.

    Returns the first row of an unknown partition or another number, or -1.
    """
    for row in range(len(partition)):
        group = np.int64(partition[row])
        if group >= len(place_of):
            return row
        place = place_of[group]
        if index[row] != counts[place]:
            return row
        counts[place] += 1
    return -1


@kernel
def rows_at(
    partition: NDArray[np.uint16],
    place_of: NDArray[np.int64],
    place: np.int64,
    out: NDArray[np.int64],
) -> int:
    """Write to ``out`` the rows at a place, rising; return how many."""
    num_rows = 0
    for row in range(len(partition)):
        if place_of[np.int64(partition[row])] == place:
            out[num_rows] = row
            num_rows += 1
    return num_rows
