"""Draw ids from given distributions in constant time each (Walker's alias method).

Draws depend on counters, not on a state.

The random number of a draw is a hash of (seed, stream, counter), so that any part of the data can
be generated alone and chunks of any size give the same data.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.fill.numba import bits
from pibroch.kernels.policy import kernel

_UNIT = 2.0**-53


@kernel
def random_bits(key: np.uint64, counter: int) -> np.uint64:
    """64 random bits: SplitMix64 of the stream ``key`` at ``counter - 1``."""
    return bits(key, np.uint64(counter) - np.uint64(1))


@kernel
def uniform(key: np.uint64, first: int, count: int) -> NDArray[np.float64]:
    """Numbers in [0, 1) at counters ``first`` to ``first + count``, float64 ``[count]``."""
    values = np.empty(count)
    for i in range(count):
        values[i] = np.float64(random_bits(key, first + i) >> np.uint64(11)) * _UNIT
    return values


@kernel
def alias_table(
    probabilities: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """Walker's tables ``[rows]``: the chance to keep a cell, and the row taken otherwise."""
    count = len(probabilities)
    keep = np.ones(count)
    alias = np.arange(count).astype(np.int32)
    scaled = probabilities * count
    small = np.empty(count, np.int64)
    large = np.empty(count, np.int64)
    num_small = num_large = 0
    for row in range(count):
        if scaled[row] < 1.0:
            small[num_small] = row
            num_small += 1
        else:
            large[num_large] = row
            num_large += 1
    while num_small and num_large:
        num_small -= 1
        under = small[num_small]
        over = large[num_large - 1]
        keep[under] = scaled[under]
        alias[under] = over
        scaled[over] -= 1.0 - scaled[under]
        if scaled[over] < 1.0:
            num_large -= 1
            small[num_small] = over
            num_small += 1
    return keep, alias


@kernel
def draw_ids(
    key: np.uint64, first: int, count: int, keep: NDArray[np.float64], alias: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Ids at counters ``first`` to ``first + count`` of a stream, int32 ``[count]``.

    The high 32 bits choose a cell, the low 32 bits whether its own id is kept; tables of up to
    2**32 rows.
    """
    ids = np.empty(count, np.int32)
    num_rows = np.uint64(len(keep))
    low = np.uint64(0xFFFFFFFF)
    for i in range(count):
        bits = random_bits(key, first + i)
        cell = ((bits >> np.uint64(32)) * num_rows) >> np.uint64(32)
        kept = np.float64(bits & low) * 2.0**-32 < keep[cell]
        ids[i] = cell if kept else alias[cell]
    return ids
