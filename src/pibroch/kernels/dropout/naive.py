"""What dropout by counter means, in Python's integers.

Shape legend: B samples, C columns, H = (C + 1) // 2 hashes a sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

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


def dropout(
    x_BC: NDArray[np.float32], key: int, p: float, numbers: Sequence[int]
) -> NDArray[np.float32]:
    """``x / (1 - p)`` where an element's 32 bits are at least ``p * 2**32``, else ``0 * x``.

    Columns c and c + H of sample number n share a hash, the one of counter ``n * H + c``: its lower
    and its upper half.
    """
    out = np.empty_like(x_BC)
    num_columns = x_BC.shape[1]
    hashes = (num_columns + 1) // 2
    for b in range(len(x_BC)):
        for c in range(num_columns):
            half, place = divmod(c, hashes)
            drawn = bits(key, int(numbers[b]) * hashes + place) >> (32 * half) & 0xFFFFFFFF
            out[b, c] = x_BC[b, c] * (
                np.float32(1 / (1 - p)) if drawn >= round(p * 2**32) else np.float32(0)
            )
    return out
