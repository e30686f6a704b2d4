"""What weights of 16 bits mean, in plain NumPy: a bfloat16 is the upper half of a float32."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.arrays import Array, Records

Halves = NDArray[np.uint16]
Words = Array  # 32 bits each, as uint64
SPECIAL = 0x7F800000
MANTISSA = 0x007FFFFF
QUIET = 0x00400000


def widened(numbers: Array) -> Array:
    """The bits of bfloat16 as float32; float32 as it is.

    >>> widened(np.array([0x3F80, 0xC020], np.uint16))
    array([ 1. , -2.5], dtype=float32)
    """
    if numbers.dtype != np.uint16:
        return numbers
    return (numbers.astype(np.uint32) << 16).view(np.float32)


def nearest(numbers: Records) -> Halves:
    """The nearest bfloat16, of two equally near ones the even one.

    Infinities and NaN stay what they are.

    >>> widened(nearest(np.array([1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, np.inf], np.float32)))
    array([1.      , 1.      , 1.015625,      inf], dtype=float32)
    """
    bits = _bits(numbers)
    return _rounded(bits, 0x7FFF + ((bits >> 16) & 1))


def stochastic(numbers: Records, keys: NDArray[np.uint32]) -> Halves:
    """One of the two bfloat16 that enclose a number, the nearer one the more often.

    The mean of many draws is the number.

    The draw is a hash of the number's bits and the key, so that whoever computes the same number in
    the same step rounds it alike, wherever the row is.

    Args:
        numbers: float32.
        keys: uint32, a key for each of the numbers.
    """
    bits = _bits(numbers)
    return _rounded(bits, mixed(bits ^ keys.astype(np.uint64)) >> 16)


def mixed(numbers: Words) -> Words:
    """A bijection of 32 bits: each bit of the result depends on all bits.

    The constants are C. Wellons' *lowbias32*.
    """
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        numbers = ((numbers ^ (numbers >> shift)) * factor) & 0xFFFFFFFF
    result: Words = numbers ^ (numbers >> 16)
    return result


def _bits(numbers: Records) -> Words:
    return np.asarray(numbers, np.float32).view(np.uint32).astype(np.uint64)


def _rounded(bits: Words, added: Words) -> Halves:
    special = bits & SPECIAL == SPECIAL
    # quiet: a NaN all of whose bits are among the lower ones would become an infinity
    kept = bits | np.where(bits & MANTISSA != 0, QUIET, 0).astype(np.uint64)
    return (np.where(special, kept, bits + added) >> 16).astype(np.uint16)
