"""Combine each touched row's gradients and apply one optimizer step to its record, in one pass over the rows.

U distinct rows, D weights in a row, W floats in a record, V positions. A thread owns the rows in its range: it sums their
gradients in the order given by :mod:`pibroch.kernels.dedupe` and writes nothing else, so neither atomics nor barriers are
needed and the result does not depend on the number of threads.

All updates share the arguments ``(records, grouped, gradients, hyper, start, stop)``: ``records`` float32 ``[rows, W]``,
``grouped`` a :class:`Grouped`, ``gradients`` float32 ``[B * F, D]``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.policy import kernel
from pibroch.kernels.prefetch import prefetch_row
from pibroch.kernels.scatter_update.hyper import Hyper

AHEAD = 6  # rows between the one that is updated and the one that is fetched
Records = NDArray[np.float32]


class Grouped(NamedTuple):
    """The positions of a batch grouped by row.

    Attributes:
        rows: int64 ``[U]``, distinct rows, rising.
        segments: int32 ``[U + 1]``.
        order: int32 ``[V]``: row u has the positions ``order[segments[u] : segments[u + 1]]``.
        source: int32 ``[V]``: the gradient's row for a position.
        scale: float32 ``[V]``, or empty for all ones.
    """

    rows: NDArray[np.int64]
    segments: NDArray[np.int32]
    order: NDArray[np.int32]
    source: NDArray[np.int32]
    scale: NDArray[np.float32]


@kernel
def combine(
    records: Records, grouped: Grouped, gradients: Records, hyper: Hyper, u: int, total: NDArray[np.float32]
) -> None:
    """Write the gradient of the u-th row, clipped and with weight decay, to ``total`` ``[D]``."""
    if u + AHEAD < len(grouped.rows):
        prefetch_row(records, grouped.rows[u + AHEAD])
        prefetch_row(gradients, np.int64(grouped.source[grouped.order[grouped.segments[u + AHEAD]]]))
    dim = len(total)
    begin, end = grouped.segments[u], grouped.segments[u + 1]
    scaled = len(grouped.scale) > 0
    total[:] = 0.0
    for i in range(begin, end):
        position = grouped.order[i]
        gradient = gradients[grouped.source[position]]
        factor = grouped.scale[position] if scaled else np.float32(1.0)
        for d in range(dim):
            total[d] += factor * gradient[d]
    if hyper.max_norm > 0.0:
        norm = np.sqrt(mean_square(total) * np.float32(dim))
        if norm > hyper.max_norm:
            clip = hyper.max_norm / norm
            for d in range(dim):
                total[d] *= clip
    if hyper.weight_decay != 0.0:
        record = records[grouped.rows[u]]
        for d in range(dim):
            total[d] += hyper.weight_decay * record[d]


@kernel
def mean_square(vector: NDArray[np.float32]) -> np.float32:
    """Mean of the squares."""
    total = np.float32(0.0)
    for d in range(len(vector)):
        total += vector[d] * vector[d]
    return total / np.float32(len(vector))


@kernel
def sgd(records: Records, grouped: Grouped, gradients: Records, hyper: Hyper, start: int, stop: int) -> None:
    """Stochastic gradient descent; no state."""
    dim = gradients.shape[1]
    total = np.empty(dim, np.float32)
    for u in range(start, stop):
        combine(records, grouped, gradients, hyper, u, total)
        record = records[grouped.rows[u]]
        for d in range(dim):
            record[d] -= hyper.lr * total[d]


@kernel
def adagrad(records: Records, grouped: Grouped, gradients: Records, hyper: Hyper, start: int, stop: int) -> None:
    """Adagrad; state: sum of squares ``[D]``."""
    dim = gradients.shape[1]
    total = np.empty(dim, np.float32)
    for u in range(start, stop):
        combine(records, grouped, gradients, hyper, u, total)
        weights = records[grouped.rows[u], :dim]
        squares = records[grouped.rows[u], dim : 2 * dim]
        for d in range(dim):
            square = squares[d] + total[d] * total[d]
            squares[d] = square
            weights[d] -= hyper.lr * total[d] / (np.sqrt(square) + hyper.eps)


@kernel
def row_wise_adagrad(
    records: Records, grouped: Grouped, gradients: Records, hyper: Hyper, start: int, stop: int
) -> None:
    """Row-wise Adagrad; state: sum of mean squares ``[1]``."""
    dim = gradients.shape[1]
    total = np.empty(dim, np.float32)
    for u in range(start, stop):
        combine(records, grouped, gradients, hyper, u, total)
        record = records[grouped.rows[u]]
        square = record[dim] + mean_square(total)
        record[dim] = square
        rate = hyper.lr / (np.sqrt(square) + hyper.eps)
        for d in range(dim):
            record[d] -= rate * total[d]


@kernel
def adam(records: Records, grouped: Grouped, gradients: Records, hyper: Hyper, start: int, stop: int) -> None:
    """Adam on touched rows; state: first and second moment ``[2 * D]``."""
    dim = gradients.shape[1]
    total = np.empty(dim, np.float32)
    rate = hyper.lr / hyper.correction1
    root = np.float32(1.0) / np.sqrt(hyper.correction2)
    for u in range(start, stop):
        combine(records, grouped, gradients, hyper, u, total)
        weights = records[grouped.rows[u], :dim]
        firsts = records[grouped.rows[u], dim : 2 * dim]
        seconds = records[grouped.rows[u], 2 * dim : 3 * dim]
        for d in range(dim):
            first = firsts[d] + (np.float32(1.0) - hyper.beta1) * (total[d] - firsts[d])
            second = seconds[d] + (np.float32(1.0) - hyper.beta2) * (total[d] * total[d] - seconds[d])
            firsts[d] = first
            seconds[d] = second
            weights[d] -= rate * first / (np.sqrt(second) * root + hyper.eps)


@kernel
def row_wise_adam(records: Records, grouped: Grouped, gradients: Records, hyper: Hyper, start: int, stop: int) -> None:
    """Adam with one second moment a row; state: first moment ``[D]``, second moment ``[1]``."""
    dim = gradients.shape[1]
    total = np.empty(dim, np.float32)
    for u in range(start, stop):
        combine(records, grouped, gradients, hyper, u, total)
        weights = records[grouped.rows[u], :dim]
        firsts = records[grouped.rows[u], dim : 2 * dim]
        second = records[grouped.rows[u], 2 * dim]
        second += (np.float32(1.0) - hyper.beta2) * (mean_square(total) - second)
        records[grouped.rows[u], 2 * dim] = second
        rate = hyper.lr / hyper.correction1 / (np.sqrt(second / hyper.correction2) + hyper.eps)
        for d in range(dim):
            first = firsts[d] + (np.float32(1.0) - hyper.beta1) * (total[d] - firsts[d])
            firsts[d] = first
            weights[d] -= rate * first
