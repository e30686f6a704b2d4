"""A count-min sketch with conservative updates (Estan and Varghese 2002).

A key has a cell in each of H lines of W; its count is the least of them, never too low. Only cells
that are below the new count are raised, so that keys which share some of a key's cells add less to
it. Keys of one call are all read before any is written, so their order makes no difference.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.arrays import Ints
from pibroch.kernels.key_table.numba import HALF, LOW_HALF, mixed
from pibroch.kernels.policy import kernel

NUM_HASHES = 4
MOST = 255  # that a cell can count


@kernel
def add(cells: NDArray[np.uint8], keys: Ints, counts: Ints, limit: int, totals: Ints) -> None:
    """Count distinct keys that were seen some times more.

    Keys whose count reaches ``limit`` that way are reported and not counted: they are counted
    elsewhere from now on.

    Args:
        cells: ``[H, W]``.
        keys: ``[N]``.
        counts: ``[N]``.
        limit: at most ``MOST``.
        totals: ``[N]``, receives how often each was seen so far.
    """
    width = np.uint64(cells.shape[1])
    places = np.empty((len(keys), NUM_HASHES), np.int64)
    for i in range(len(keys)):
        z = mixed(keys[i])
        count = np.int64(MOST)
        for line in range(NUM_HASHES):
            # lines' hashes by double hashing (Kirsch and Mitzenmacher 2006)
            hash_ = ((z & LOW_HALF) + np.uint64(line) * ((z >> HALF) | np.uint64(1))) & LOW_HALF
            places[i, line] = np.int64((hash_ * width) >> HALF)
            cell = np.int64(cells[line, places[i, line]])
            if cell < count:
                count = cell
        totals[i] = count + counts[i]
    for i in range(len(keys)):
        if totals[i] < limit:
            for line in range(NUM_HASHES):
                if cells[line, places[i, line]] < totals[i]:
                    cells[line, places[i, line]] = totals[i]
