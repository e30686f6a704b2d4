"""Dropout whose mask is a function of numbers, not of a generator's state."""

import numpy as np

from pibroch.kernels import parallel
from pibroch.kernels.arrays import Ints, Records
from pibroch.kernels.dropout import numba
from pibroch.kernels.operation import Operation

__all__ = ["dropout"]

ELEMENTS_PER_THREAD = 1 << 18  # below which a further thread is not worth waking


@Operation
def dropout(x_BC: Records, out_BC: Records, key: int, p: float, numbers: Ints) -> None:
    """Write ``x_BC``, masked and scaled by ``1 / (1 - p)``.

    NaN stays NaN, whether or not it is masked.

    Args:
        x_BC: ``[B, C]``, contiguous.
        out_BC: the same shape.
        key: of this layer in this step.
        p: the chance of an element to be masked, below 1.
        numbers: of the samples in the global batch, ``[B]``.
    """
    parallel.run(
        numba.dropout,
        len(x_BC),
        x_BC,
        out_BC,
        np.uint64(key),
        np.uint64(round(p * 2**32)),
        np.float32(1 / (1 - p)),
        numbers,
        grain=1 + ELEMENTS_PER_THREAD // max(1, x_BC.shape[1]),
    )
