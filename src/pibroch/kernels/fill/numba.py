"""Counter-based random fills: the value of an element depends on the key and its number alone."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.policy import kernel

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX1 = np.uint64(0xBF58476D1CE4E5B9)
MIX2 = np.uint64(0x94D049BB133111EB)
UNIT = 1.0 / (1 << 53)


@kernel
def bits(key: np.uint64, counter: np.uint64) -> np.uint64:
    """SplitMix64 at ``counter``, 64 bits."""
    z = key + (counter + np.uint64(1)) * GOLDEN
    z = (z ^ (z >> np.uint64(30))) * MIX1
    z = (z ^ (z >> np.uint64(27))) * MIX2
    return z ^ (z >> np.uint64(31))


@kernel
def split_mix(key: np.uint64, counter: np.uint64) -> float:
    """SplitMix64 at ``counter``, as a float64 in [0, 1)."""
    return float(bits(key, counter) >> np.uint64(11)) * UNIT


@kernel
def fill_uniform(
    weights: NDArray[np.float32],
    rows: NDArray[np.int64],
    key: np.uint64,
    bound: np.float32,
    start: int,
    stop: int,
) -> None:
    """Uniform in [-bound, bound) for ``weights[start:stop]`` ``[rows, D]``.

    Row i is the table's ``rows[i]``.
    """
    dim = weights.shape[1]
    for row in range(start, stop):
        for d in range(dim):
            u = split_mix(key, np.uint64(rows[row] * dim + d))
            weights[row, d] = bound * np.float32(2.0 * u - 1.0)


@kernel
def fill_normal(
    weights: NDArray[np.float32],
    rows: NDArray[np.int64],
    key: np.uint64,
    std: np.float32,
    start: int,
    stop: int,
) -> None:
    """Normal(0, std) by Box and Muller, two uniforms an element."""
    dim = weights.shape[1]
    for row in range(start, stop):
        for d in range(dim):
            element = np.uint64(2 * (rows[row] * dim + d))
            radius = math.sqrt(-2.0 * math.log(1.0 - split_mix(key, element)))
            angle = 2.0 * math.pi * split_mix(key, element + np.uint64(1))
            weights[row, d] = std * np.float32(radius * math.cos(angle))
