"""Rising numbers in few bytes: LEB128 of their distances.

The distinct rows of a batch take 1 to 2 bytes each, not 8.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.arrays import Array
from pibroch.kernels.policy import kernel

MAX_BYTES = 9  # of one number below 2**63


@kernel
def encode(numbers: NDArray[np.int64], out: NDArray[np.uint8]) -> int:
    """Write rising ``numbers``, all at least 0, to ``out`` of ``MAX_BYTES`` bytes each.

    Returns how many bytes were written.
    """
    before = np.int64(0)
    filled = 0
    for number in numbers:
        gap = number - before
        before = number
        while gap >= 128:
            out[filled] = (gap & 127) | 128
            filled += 1
            gap >>= 7
        out[filled] = gap
        filled += 1
    return filled


@kernel
def decode(encoded: NDArray[np.uint8], numbers: Array) -> int:
    """Write the numbers encoded to ``numbers``.

    Returns how many bytes they took, or -1 where these do not hold so many.
    """
    at = 0
    number = 0
    for i in range(len(numbers)):
        gap = 0
        shift = 0
        byte = 128
        while byte >= 128:
            if at == len(encoded) or shift > 56:
                return -1
            byte = int(encoded[at])
            gap |= (byte & 127) << shift
            shift += 7
            at += 1
        number += gap
        numbers[i] = number
    return at
