"""What draws mean: SplitMix64 in Python's own integers, and the odds of alias tables."""

from __future__ import annotations

import numpy as np

from pibroch.kernels.arrays import Array
from pibroch.kernels.fill.naive import bits


def random_bits(key: int, counter: int) -> int:
    """64 random bits: SplitMix64 of the stream ``key`` at ``counter - 1``."""
    return bits(key, counter - 1)


def uniform(key: int, first: int, count: int) -> Array:
    """Numbers in [0, 1), the upper 53 of the bits."""
    return np.array([(random_bits(key, first + i) >> 11) * 2.0**-53 for i in range(count)])


def odds(keep: Array, alias: Array) -> Array:
    """The probability of each row when a cell is drawn and kept, or its alias taken."""
    probabilities = np.asarray(keep, np.float64).copy()
    np.add.at(probabilities, alias, 1.0 - keep)
    return probabilities / len(keep)


def draw_ids(key: int, first: int, count: int, keep: Array, alias: Array) -> Array:
    """The high half of a counter's bits chooses the cell, the low half whether it is kept."""
    ids = np.empty(count, np.int32)
    for i in range(count):
        high, low = divmod(random_bits(key, first + i), 2**32)
        cell = high * len(keep) >> 32
        ids[i] = cell if low * 2.0**-32 < keep[cell] else alias[cell]
    return ids
