"""What random fills mean: each element by a hash of the key and its number in the whole table."""

from __future__ import annotations

import math

import numpy as np

from pibroch.kernels.arrays import Array

WORD = (1 << 64) - 1


def bits(key: int, counter: int) -> int:
    """SplitMix64 at ``counter``, 64 bits.

    >>> hex(bits(0, 0))
    '0xe220a8397b1dcdaf'
    """
    z = (key + (counter + 1) * 0x9E3779B97F4A7C15) & WORD
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & WORD
    return z ^ (z >> 31)


def split_mix(key: int, counter: int) -> float:
    """SplitMix64 at ``counter``, as a number in [0, 1)."""
    return (bits(key, counter) >> 11) * 2.0**-53


def uniform(rows: Array, dim: int, key: int, bound: float) -> Array:
    """Uniform in [-bound, bound), ``[rows, D]``."""
    elements = [[split_mix(key, row * dim + d) for d in range(dim)] for row in rows.tolist()]
    return (bound * (2 * np.array(elements) - 1)).astype(np.float32)


def normal(rows: Array, dim: int, key: int, std: float) -> Array:
    """Normal(0, std) by Box and Muller, ``[rows, D]``."""
    weights = np.empty((len(rows), dim), np.float32)
    for i, row in enumerate(rows.tolist()):
        for d in range(dim):
            element = 2 * (row * dim + d)
            radius = math.sqrt(-2 * math.log(1 - split_mix(key, element)))
            weights[i, d] = std * radius * math.cos(2 * math.pi * split_mix(key, element + 1))
    return weights
