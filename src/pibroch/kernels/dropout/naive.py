"""What dropout by counter means, in Python's integers.

Shape legend: B samples, C columns, H = (C + 1) // 2 hashes a sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.fill.naive import bits


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
