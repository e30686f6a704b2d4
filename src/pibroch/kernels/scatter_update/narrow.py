"""Updates of records with bfloat16 weights.

The optimizers' own kernels, on some rows at a time that were made float32.

U distinct rows, D weights in a row, W floats in a record, of which the weights take ``ceil(D /
2)``. Rows are widened into a scratch that stays in the cache, with their state; updated there,
once, by what updates float32 records; rounded, and written back. Moving averages are advanced on
the way: they follow the weights as they are kept.

All updates share the arguments ``(records, stored, grouped, gradients, hyper, rounding, start,
stop)``: ``stored`` are the records as uint16, the others as in
:mod:`pibroch.kernels.scatter_update.numba`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from pibroch.kernels.arrays import Records
from pibroch.kernels.average.numba import advance
from pibroch.kernels.bits import cut_for, widened
from pibroch.kernels.memory import MAX_SHORT_DIM, prefetch_row
from pibroch.kernels.narrow.numba import round_rows
from pibroch.kernels.policy import FASTMATH, kernel
from pibroch.kernels.scatter_update import numba as wide
from pibroch.kernels.scatter_update.hyper import Hyper
from pibroch.kernels.scatter_update.numba import ROWS_AHEAD, Grouped

ROWS_AT_ONCE = 128
Halves = NDArray[np.uint16]


class Rounding(NamedTuple):
    """How updated weights are rounded, and what else happens to rows meanwhile.

    Attributes:
        keys: uint32 ``[columns]`` of this step, see :func:`pibroch.kernels.narrow.numba.keys_of`;
            empty for the nearest.
        first_columns: int32 ``[U]``, of each row the table's column that is its first; empty where
            that is 0.
        average_at: column of a record, were it float32, with which its moving average begins; -1
            for none.
        decay: of that average.
        step: number of this update.
    """

    keys: NDArray[np.uint32]
    first_columns: NDArray[np.int32]
    average_at: int
    decay: float
    step: int


@kernel
def load(
    records: Records,
    stored: Halves,
    rows: NDArray[np.int64],
    first: int,
    last: int,
    dim: int,
    scratch: Records,
) -> None:
    """Copy the rows ``first`` to ``last`` to ``scratch`` ``[rows, D + state]``."""
    width = records.shape[1]
    num_rows = len(rows)
    is_long = width > MAX_SHORT_DIM
    # sums of indices would keep loops from being vectors
    state = records[:, (dim + 1) // 2 :]
    scratch_state = scratch[:, dim:]
    num_state = state.shape[1]
    for u in range(first, last):
        prefetch_row(records, rows[min(u + ROWS_AHEAD, num_rows - 1)], width, is_long)
        row = rows[u]
        i = u - first
        for d in range(dim):
            scratch[i, d] = widened(stored[row, d])
        for d in range(num_state):
            scratch_state[i, d] = state[row, d]


@kernel
def store(
    records: Records,
    stored: Halves,
    rows: NDArray[np.int64],
    first: int,
    last: int,
    dim: int,
    scratch: Records,
) -> None:
    """The inverse of :func:`load`, of weights that were rounded."""
    state = records[:, (dim + 1) // 2 :]
    scratch_state = scratch[:, dim:]
    num_state = state.shape[1]
    for u in range(first, last):
        row = rows[u]
        i = u - first
        for d in range(dim):
            stored[row, d] = cut_for(stored, scratch[i, d])
        for d in range(num_state):
            state[row, d] = scratch_state[i, d]


def run(
    update: Callable[..., None],
    records: Records,
    stored: Halves,
    grouped: Grouped,
    gradients: Records,
    hyper: Hyper,
    rounding: Rounding,
    start: int,
    stop: int,
) -> None:
    """Apply ``update``, a kernel for float32 records, to the rows ``start`` to ``stop``."""
    rows, segments, order, source, scale, means, rows_per_gradient = grouped
    keys, columns, average_at, decay, step = rounding
    dim = gradients.shape[1] * rows_per_gradient
    scratch = np.empty((ROWS_AT_ONCE, dim + records.shape[1] - (dim + 1) // 2), np.float32)
    words = scratch.view(np.uint32)
    here = np.arange(ROWS_AT_ONCE)
    for first in range(start, stop, ROWS_AT_ONCE):
        last = min(first + ROWS_AT_ONCE, stop)
        count = last - first
        load(records, stored, rows, first, last, dim, scratch)
        if average_at >= 0:
            advance(scratch, here, dim, average_at, decay, step - 1, 0, count)
        part = Grouped(
            here[:count],
            segments[first : last + 1],
            order,
            source,
            scale,
            means[min(first, len(means)) : last],
            rows_per_gradient,
        )
        update(scratch, part, gradients, hyper, 0, count)
        round_rows(words, count, dim, keys, columns[min(first, len(columns)) : last])
        if average_at >= 0:
            advance(scratch, here, dim, average_at, decay, step, 0, count)
        store(records, stored, rows, first, last, dim, scratch)


# part of each kernel below, which is cached: a function that takes functions cannot be
_run: Callable[..., None] = njit(nogil=True, fastmath=FASTMATH, error_model="numpy")(run)


@kernel
def sgd(
    records: Records,
    stored: Halves,
    grouped: Grouped,
    gradients: Records,
    hyper: Hyper,
    rounding: Rounding,
    start: int,
    stop: int,
) -> None:
    """Stochastic gradient descent; no state."""
    _run(wide.sgd, records, stored, grouped, gradients, hyper, rounding, start, stop)


@kernel
def adagrad(
    records: Records,
    stored: Halves,
    grouped: Grouped,
    gradients: Records,
    hyper: Hyper,
    rounding: Rounding,
    start: int,
    stop: int,
) -> None:
    """Adagrad; state: sum of squares ``[D]``."""
    _run(wide.adagrad, records, stored, grouped, gradients, hyper, rounding, start, stop)


@kernel
def row_wise_adagrad(
    records: Records,
    stored: Halves,
    grouped: Grouped,
    gradients: Records,
    hyper: Hyper,
    rounding: Rounding,
    start: int,
    stop: int,
) -> None:
    """Row-wise Adagrad; state: sum of mean squares ``[1]``."""
    _run(wide.row_wise_adagrad, records, stored, grouped, gradients, hyper, rounding, start, stop)


@kernel
def adam(
    records: Records,
    stored: Halves,
    grouped: Grouped,
    gradients: Records,
    hyper: Hyper,
    rounding: Rounding,
    start: int,
    stop: int,
) -> None:
    """Adam on touched rows; state: first and second moment ``[2 * D]``."""
    _run(wide.adam, records, stored, grouped, gradients, hyper, rounding, start, stop)


@kernel
def row_wise_adam(
    records: Records,
    stored: Halves,
    grouped: Grouped,
    gradients: Records,
    hyper: Hyper,
    rounding: Rounding,
    start: int,
    stop: int,
) -> None:
    """Adam with one second moment a row; state: first moment ``[D]``, second moment ``[1]``."""
    _run(wide.row_wise_adam, records, stored, grouped, gradients, hyper, rounding, start, stop)
