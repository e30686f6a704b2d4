"""Rising numbers in few bytes: LEB128 of their distances.

The distinct rows of a batch take 1 to 2 bytes each, not 8.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.arrays import Array
from pibroch.kernels.policy import kernel

MAX_BYTES = 10  # of one number


@kernel
def encode(numbers: NDArray[np.int64] | NDArray[np.uint64], out: NDArray[np.uint8]) -> int:
    """Write rising ``numbers`` to ``out`` of ``MAX_BYTES`` bytes each.

    Negative ones, before the others, are numbers modulo 2**64.

    Returns how many bytes were written.
    """
    before = np.uint64(0)
    filled = 0
    for each in numbers:
        number = np.uint64(each)
        gap = number - before
        before = number
        while gap >= np.uint64(128):
            out[filled] = (gap & np.uint64(127)) | np.uint64(128)
            filled += 1
            gap >>= np.uint64(7)
        out[filled] = gap
        filled += 1
    return filled


@kernel
def decode(encoded: NDArray[np.uint8], numbers: Array) -> int:
    """Write the numbers encoded to ``numbers``.

    Returns how many bytes they took, or -1 where these do not hold so many.
    """
    at = 0
    number = np.uint64(0)
    for i in range(len(numbers)):
        gap = np.uint64(0)
        shift = 0
        byte = 128
        while byte >= 128:
            if at == len(encoded) or shift > 63:
                return -1
            byte = int(encoded[at])
            gap |= np.uint64(byte & 127) << np.uint64(shift)
            shift += 7
            at += 1
        number += gap
        numbers[i] = number
    return at
