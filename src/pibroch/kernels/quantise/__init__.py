"""Rows of bytes: how they are made, and how they are looked up where they lie.

R rows in a part, D weights in a row, W bytes in a row, V ids, B samples, F features. Bags are as in
:mod:`pibroch.kernels.gather_pool`; rows that the part does not hold are left to the other parts.
"""

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels import parallel
from pibroch.kernels.arrays import Bytes, Ints, Records, Stored
from pibroch.kernels.operation import Operation
from pibroch.kernels.quantise import numba
from pibroch.kernels.quantise.naive import record_bytes

__all__ = ["add_bytes", "add_numbers", "quantise", "record_bytes", "take"]

ROWS_PER_THREAD = 4096  # below which a further thread is not worth waking


@Operation
def quantise(weights: Records, out: Bytes) -> None:
    """Write rows of bytes ``[R, W]`` of float32 weights ``[R, D]``."""
    parallel.run(
        numba.quantise, len(out), weights, out, out.view(np.float32), grain=ROWS_PER_THREAD
    )


@Operation
def take(
    row_ids: Ints, first_rows: Ints, num_rows: Ints, addresses: Ints, out: NDArray[np.uint16]
) -> None:
    """Copy rows from the parts in which they lie to ``out`` ``[V, W / 2]``.

    A row that is in none becomes zeros.

    Args:
        row_ids: ``[V]``.
        first_rows: of each part, rising ``[P]``.
        num_rows: in each part.
        addresses: of their rows in memory, which the caller holds.
        out: rows as pairs of bytes.
    """
    parallel.run(
        numba.take,
        len(row_ids),
        row_ids,
        first_rows,
        num_rows,
        addresses,
        out,
        grain=ROWS_PER_THREAD,
    )


@Operation
def add_bytes(
    records: Bytes,
    words: Records,
    first_row: int,
    row_ids: Ints,
    offsets: Ints,
    scale: Records,
    pooled_BFD: Records,
) -> None:
    """Add rows of bytes to bags; ``words`` is the same memory as float32 ``[R, W / 4]``."""
    parallel.run(
        numba.add_bytes,
        len(offsets) - 1,
        records,
        words,
        first_row,
        row_ids,
        offsets,
        scale,
        pooled_BFD,
    )


@Operation
def add_numbers(
    records: Stored,
    first_row: int,
    row_ids: Ints,
    offsets: Ints,
    scale: Records,
    pooled_BFD: Records,
) -> None:
    """Add rows of float32 or float16 ``[R, D]`` to bags."""
    parallel.run(
        numba.add_numbers,
        len(offsets) - 1,
        records,
        first_row,
        row_ids,
        offsets,
        scale,
        pooled_BFD,
    )
