"""What the sketch means, in plain NumPy. Shapes as in :mod:`pibroch.kernels.count_min.numba`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.arrays import Ints


def places(keys: Ints, num_lines: int, width: int) -> Ints:
    """The cell of each key in each line, ``[N, H]``."""
    mask = (1 << 64) - 1
    found = []
    for key in keys.tolist():
        z = key & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
        hashes = [(z + line * ((z >> 32) | 1)) & 0xFFFFFFFF for line in range(num_lines)]
        found.append([(hash_ * width) >> 32 for hash_ in hashes])
    return np.array(found, np.int64).reshape(len(keys), num_lines)


def add(cells: NDArray[np.uint8], keys: Ints, counts: Ints, limit: int) -> Ints:
    """Count distinct keys; return how often each was seen so far."""
    num_lines, width = cells.shape
    lines = np.arange(num_lines)
    cell_of = places(keys, num_lines, width)
    totals: Ints = cells[lines, cell_of].min(axis=1, initial=255) + counts
    for place, total in zip(cell_of, totals, strict=True):
        if total < limit:
            cells[lines, place] = np.maximum(cells[lines, place], total)
    return totals
