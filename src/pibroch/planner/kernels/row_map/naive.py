"""What the kernels mean, without a thought of speed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def number_rows(
    partition: NDArray[np.uint16],
    place_of: NDArray[np.int64],
    counts: NDArray[np.int64],
    index: NDArray[np.uint32],
) -> int:
    """Number the rows of one table at each place.

    Return the first row of an unknown partition, or -1.
    """
    for row, group in enumerate(partition.tolist()):
        if group >= len(place_of):
            return row
        index[row] = counts[place_of[group]]
        counts[place_of[group]] += 1
    return -1


def check_numbers(
    partition: NDArray[np.uint16],
    place_of: NDArray[np.int64],
    counts: NDArray[np.int64],
    index: NDArray[np.uint32],
) -> int:
    """As :func:`number_rows`, but compare.

    Returns the first row of an unknown partition or another number, or -1.
    """
    expected = np.empty_like(index)
    bad = number_rows(partition, place_of, counts, expected)
    wrong = np.flatnonzero(
        expected[: bad if bad >= 0 else None] != index[: bad if bad >= 0 else None]
    )
    return int(wrong[0]) if len(wrong) else bad


def rows_at(
    partition: NDArray[np.uint16], place_of: NDArray[np.int64], place: int, out: NDArray[np.int64]
) -> int:
    """Write to ``out`` the rows at a place, rising; return how many."""
    rows = np.flatnonzero(place_of[partition] == place)
    out[: len(rows)] = rows
    return len(rows)
