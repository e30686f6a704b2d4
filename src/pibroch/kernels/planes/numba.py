"""Numbers as planes of bytes: what is alike in them, their highest bytes, lies side by side."""

from __future__ import annotations

from pibroch.kernels.arrays import Array, Bytes
from pibroch.kernels.policy import kernel


@kernel
def split(numbers: Array, low: Bytes, top: Bytes) -> None:
    """Take numbers apart.

    Args:
        numbers: unsigned ``[n]``, of k bytes each.
        low: ``[k - 1, n]``, their bytes but the highest, from the lowest on.
        top: ``[n]``, their highest bytes.
    """
    planes = len(low)
    for plane in range(planes):
        for i in range(len(numbers)):
            low[plane, i] = (numbers[i] >> (8 * plane)) & 255
    for i in range(len(numbers)):
        top[i] = numbers[i] >> (8 * planes)


@kernel
def join(low: Bytes, top: Bytes, numbers: Array) -> None:
    """The inverse of :func:`split`."""
    planes = len(low)
    for i in range(len(numbers)):
        numbers[i] = top[i]
    for plane in range(planes - 1, -1, -1):
        for i in range(len(numbers)):
            numbers[i] = (numbers[i] << 8) | low[plane, i]
