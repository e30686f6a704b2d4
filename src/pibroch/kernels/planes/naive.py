"""What the plane kernels mean, without a thought of speed."""

from __future__ import annotations

import numpy as np

from pibroch.kernels.arrays import Array, Bytes


def split(numbers: Array, low: Bytes, top: Bytes) -> None:
    """All numbers' lowest bytes, then their second ones, and so on; the highest ones to ``top``."""
    planes = numbers.view(np.uint8).reshape(len(numbers), numbers.itemsize).T
    low[:] = planes[:-1]
    top[:] = planes[-1]


def join(low: Bytes, top: Bytes, numbers: Array) -> None:
    """The inverse of :func:`split`."""
    numbers.view(np.uint8).reshape(len(numbers), numbers.itemsize)[:] = np.concatenate(
        [low, top[None]]
    ).T
