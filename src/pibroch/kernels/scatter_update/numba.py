"""Combine each touched row's gradients and apply one optimizer step to its record.

U distinct rows, D weights in a row, W floats in a record, V positions. A thread owns the rows in
its range: it sums their gradients in the order given by :mod:`pibroch.kernels.dedupe` and writes
nothing else, so neither atomics nor barriers are needed and the result does not depend on the
number of threads.

All updates share the arguments ``(records, grouped, gradients, hyper, start, stop)``: ``records``
float32 ``[rows, W]``, ``grouped`` a :class:`Grouped`, ``gradients`` float32 ``[N, unit]``, of which
a gradient is one row or several. They work on a few rows at a time: sums first, into a buffer that
stays in the first-level cache, then the optimizer. Handing an array to a function or slicing a row
counts references atomically, which a row alone cannot pay for (measured: 94 ns a row instead of 55
at D = 16), and for every eight rows not well (8 ns a row for one array more that is no argument of
the kernel).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.arrays import Records
from pibroch.kernels.memory import MAX_SHORT_DIM, prefetch_row
from pibroch.kernels.policy import kernel
from pibroch.kernels.row_sum import sum_rows
from pibroch.kernels.scatter_update.hyper import Hyper

ROWS_AHEAD = 12  # rows between the one that is updated and the one that is fetched
POSITIONS_AHEAD = 16  # positions between the gradient that is added and the one that is fetched
ROWS_AT_ONCE = 8


class Grouped(NamedTuple):
    """The positions of a batch grouped by row.

    Attributes:
        rows: int64 ``[U]``, distinct rows, rising.
        segments: int32 ``[U + 1]``.
        order: int32 ``[V]``: row u has the positions ``order[segments[u] : segments[u + 1]]``.
        source: int32 ``[V]``: the row of the gradients with which a position's begins.
        scale: float32 ``[V]``, or empty for all ones.
        mean_squares: float32 ``[U]``, mean squares of the rows' gradients where ``gradients`` are
            only some of the columns; empty for rows that are whole.
        rows_per_gradient: D over the width of the gradients, which are several where they lie
            beside those of other dims.
    """

    rows: NDArray[np.int64]
    segments: NDArray[np.int32]
    order: NDArray[np.int32]
    source: NDArray[np.int32]
    scale: NDArray[np.float32]
    mean_squares: NDArray[np.float32] = np.empty(0, np.float32)
    rows_per_gradient: int = 1


@kernel
def combine(
    records: Records,
    grouped: Grouped,
    gradients: Records,
    hyper: Hyper,
    first: int,
    last: int,
    totals: Records,
) -> None:
    """Write the gradients of some rows, clipped and with L2 decay, to ``totals`` ``[rows, D]``.

    Decoupled decay is applied to the weights.
    """
    rows, segments, order, source, scale, _, _ = grouped
    dim = totals.shape[1]
    width = records.shape[1]
    num_rows = len(rows)
    is_long = dim > MAX_SHORT_DIM
    for u in range(first, last):
        prefetch_row(records, rows[min(u + ROWS_AHEAD, num_rows - 1)], width, is_long)
        begin = segments[u]
        end = segments[u + 1]
        i = u - first
        sum_rows(
            gradients, source, order, scale, 0, begin, end, dim, POSITIONS_AHEAD, totals, i * dim
        )
    if hyper.max_element > 0.0:
        for i in range(last - first):
            for d in range(dim):
                totals[i, d] = min(max(totals[i, d], -hyper.max_element), hyper.max_element)
    if hyper.max_norm > 0.0:
        for i in range(last - first):
            square = np.float32(0.0)
            for d in range(dim):
                square += totals[i, d] * totals[i, d]
            norm = np.sqrt(square)
            if norm > hyper.max_norm:
                for d in range(dim):
                    totals[i, d] *= hyper.max_norm / norm
    if hyper.shrink != 1.0:
        for u in range(first, last):
            row = rows[u]
            for d in range(dim):
                records[row, d] *= hyper.shrink
    if hyper.weight_decay != 0.0:
        for u in range(first, last):
            row = rows[u]
            for d in range(dim):
                totals[u - first, d] += hyper.weight_decay * records[row, d]


@kernel
def sum_gradients(
    grouped: Grouped, gradients: Records, share: np.float32, totals: Records, start: int, stop: int
) -> None:
    """Write ``share`` times the gradient of each distinct row to ``totals`` ``[U, D]``."""
    segments = grouped.segments
    order = grouped.order
    source = grouped.source
    scale = grouped.scale
    dim = totals.shape[1]
    for u in range(start, stop):
        begin = segments[u]
        end = segments[u + 1]
        sum_rows(
            gradients, source, order, scale, 0, begin, end, dim, POSITIONS_AHEAD, totals, u * dim
        )
        if share != np.float32(1.0):
            for d in range(dim):
                totals[u, d] *= share


@kernel
def sgd(
    records: Records, grouped: Grouped, gradients: Records, hyper: Hyper, start: int, stop: int
) -> None:
    """Stochastic gradient descent; no state."""
    dim = gradients.shape[1] * grouped.rows_per_gradient
    rows = grouped.rows
    totals = np.empty((ROWS_AT_ONCE, dim), np.float32)
    for first in range(start, stop, ROWS_AT_ONCE):
        last = min(first + ROWS_AT_ONCE, stop)
        combine(records, grouped, gradients, hyper, first, last, totals)
        for u in range(first, last):
            row = rows[u]
            i = u - first
            for d in range(dim):
                records[row, d] -= hyper.lr * totals[i, d]


@kernel
def frozen(
    records: Records, grouped: Grouped, gradients: Records, hyper: Hyper, start: int, stop: int
) -> None:
    """No row moves."""


@kernel
def adagrad(
    records: Records, grouped: Grouped, gradients: Records, hyper: Hyper, start: int, stop: int
) -> None:
    """Adagrad; state: sum of squares ``[D]``."""
    dim = gradients.shape[1] * grouped.rows_per_gradient
    rows = grouped.rows
    totals = np.empty((ROWS_AT_ONCE, dim), np.float32)
    for first in range(start, stop, ROWS_AT_ONCE):
        last = min(first + ROWS_AT_ONCE, stop)
        combine(records, grouped, gradients, hyper, first, last, totals)
        for u in range(first, last):
            row = rows[u]
            i = u - first
            for d in range(dim):
                total = totals[i, d]
                square = records[row, dim + d] + total * total
                records[row, dim + d] = square
                records[row, d] -= hyper.lr * total / (np.sqrt(square) + hyper.eps)


@kernel
def row_wise_adagrad(
    records: Records, grouped: Grouped, gradients: Records, hyper: Hyper, start: int, stop: int
) -> None:
    """Row-wise Adagrad; state: sum of mean squares ``[1]``."""
    dim = gradients.shape[1] * grouped.rows_per_gradient
    rows = grouped.rows
    means = grouped.mean_squares
    totals = np.empty((ROWS_AT_ONCE, dim), np.float32)
    for first in range(start, stop, ROWS_AT_ONCE):
        last = min(first + ROWS_AT_ONCE, stop)
        combine(records, grouped, gradients, hyper, first, last, totals)
        for u in range(first, last):
            row = rows[u]
            i = u - first
            square = np.float32(0.0)
            for d in range(dim):
                square += totals[i, d] * totals[i, d]
            square = records[row, dim] + (means[u] if len(means) > 0 else square / np.float32(dim))
            records[row, dim] = square
            rate = hyper.lr / (np.sqrt(square) + hyper.eps)
            for d in range(dim):
                records[row, d] -= rate * totals[i, d]


@kernel
def adam(
    records: Records, grouped: Grouped, gradients: Records, hyper: Hyper, start: int, stop: int
) -> None:
    """Adam on touched rows; state: first and second moment ``[2 * D]``."""
    dim = gradients.shape[1] * grouped.rows_per_gradient
    rows = grouped.rows
    totals = np.empty((ROWS_AT_ONCE, dim), np.float32)
    rate = hyper.lr / hyper.correction1
    root = np.float32(1.0) / np.sqrt(hyper.correction2)
    fresh1 = np.float32(1.0) - hyper.beta1
    fresh2 = np.float32(1.0) - hyper.beta2
    for first in range(start, stop, ROWS_AT_ONCE):
        last = min(first + ROWS_AT_ONCE, stop)
        combine(records, grouped, gradients, hyper, first, last, totals)
        for u in range(first, last):
            row = rows[u]
            i = u - first
            for d in range(dim):
                total = totals[i, d]
                mean = records[row, dim + d]
                square = records[row, 2 * dim + d]
                mean += fresh1 * (total - mean)
                square += fresh2 * (total * total - square)
                records[row, dim + d] = mean
                records[row, 2 * dim + d] = square
                records[row, d] -= rate * mean / (np.sqrt(square) * root + hyper.eps)


@kernel
def row_wise_adam(
    records: Records, grouped: Grouped, gradients: Records, hyper: Hyper, start: int, stop: int
) -> None:
    """Adam with one second moment a row; state: first moment ``[D]``, second moment ``[1]``."""
    dim = gradients.shape[1] * grouped.rows_per_gradient
    rows = grouped.rows
    means = grouped.mean_squares
    totals = np.empty((ROWS_AT_ONCE, dim), np.float32)
    fresh1 = np.float32(1.0) - hyper.beta1
    fresh2 = np.float32(1.0) - hyper.beta2
    for first in range(start, stop, ROWS_AT_ONCE):
        last = min(first + ROWS_AT_ONCE, stop)
        combine(records, grouped, gradients, hyper, first, last, totals)
        for u in range(first, last):
            row = rows[u]
            i = u - first
            square = np.float32(0.0)
            for d in range(dim):
                square += totals[i, d] * totals[i, d]
            square = means[u] if len(means) > 0 else square / np.float32(dim)
            square = records[row, 2 * dim] + fresh2 * (square - records[row, 2 * dim])
            records[row, 2 * dim] = square
            rate = hyper.lr / hyper.correction1 / (np.sqrt(square / hyper.correction2) + hyper.eps)
            for d in range(dim):
                mean = records[row, dim + d]
                mean += fresh1 * (totals[i, d] - mean)
                records[row, dim + d] = mean
                records[row, d] -= rate * mean
