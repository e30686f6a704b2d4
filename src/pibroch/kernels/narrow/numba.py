"""Rounding to bfloat16, and the numbers by which it is random.

R rows, D weights in a row. What is rounded lies in float32 ``[R, D + state]`` and is seen as
uint32.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.arrays import Records
from pibroch.kernels.policy import kernel

Words = NDArray[np.uint32]
SPECIAL = np.uint32(0x7F800000)
MANTISSA = np.uint32(0x007FFFFF)
QUIET = np.uint32(0x00400000)


@kernel
def mixed(number: np.uint32) -> np.uint32:
    """See :func:`pibroch.kernels.narrow.naive.mixed`."""
    number = np.uint32(number ^ (number >> np.uint32(16)))
    number = np.uint32(number * np.uint32(0x7FEB352D))
    number = np.uint32(number ^ (number >> np.uint32(15)))
    number = np.uint32(number * np.uint32(0x846CA68B))
    return np.uint32(number ^ (number >> np.uint32(16)))


@kernel
def rounded(bits: np.uint32, added: np.uint32) -> np.uint32:
    """The bits of a float32 whose lower half is 0: ``bits + added`` without its lower half.

    Infinities and NaN stay.

    Added are random bits, or one less than half of what is cut and the lowest bit that stays, for
    the nearest or even one.
    """
    # quiet: a NaN all of whose bits are among the lower ones would become an infinity
    kept = bits | QUIET if (bits & MANTISSA) != 0 else bits
    result = kept if (bits & SPECIAL) == SPECIAL else bits + added
    return np.uint32(result & np.uint32(0xFFFF0000))


@kernel
def keys_of(step: int, seed: int, keys: Words) -> None:
    """Fill ``keys`` ``[columns]``, one for each column of a table in update number ``step``."""
    first = mixed(np.uint32(seed) ^ mixed(np.uint32(step & 0xFFFFFFFF)))
    first = mixed(first ^ np.uint32((step >> 32) & 0xFFFFFFFF))
    for column in range(len(keys)):
        keys[column] = mixed(first ^ mixed(np.uint32(column + 1)))


@kernel
def nearest(weights: Records, out: NDArray[np.uint16]) -> None:
    """Round ``weights`` ``[R, D]`` into ``out``: to the nearest bfloat16, ties to even."""
    words = weights.view(np.uint32)
    for row in range(words.shape[0]):
        for d in range(words.shape[1]):
            bits = words[row, d]
            even = np.uint32(np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
            out[row, d] = rounded(bits, even) >> np.uint32(16)


@kernel
def round_rows(
    words: Words, num_rows: int, dim: int, keys: Words, first_columns: NDArray[np.int32]
) -> None:
    """Round the first ``dim`` numbers of each row in place.

    With ``keys`` to a neighbour by chance, without to the nearest.

    Args:
        words: ``[R, W]``, the bits of float32.
        num_rows: that are rounded.
        dim: D.
        keys: of all columns of the table in this step, see :func:`keys_of`.
        first_columns: of each row, the column at which its block begins; empty where all begin at
            0.
    """
    for row in range(num_rows):
        if len(keys) == 0:
            for d in range(dim):
                bits = words[row, d]
                even = np.uint32(np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
                words[row, d] = rounded(bits, even)
            continue
        row_keys = keys[first_columns[row] :] if len(first_columns) > 0 else keys
        for d in range(dim):
            bits = words[row, d]
            words[row, d] = rounded(
                bits, np.uint32(mixed(np.uint32(bits ^ row_keys[d])) >> np.uint32(16))
            )
