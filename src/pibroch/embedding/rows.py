"""What every holder of rows does with the records of a shard: read them, and update each once."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pibroch.embedding.optimizers import Frozen, SparseOptimizer
from pibroch.embedding.shard import MemoryShard
from pibroch.kernels import parallel
from pibroch.kernels.arrays import Records
from pibroch.kernels.average import numba as averaging
from pibroch.kernels.dedupe import numba as grouping
from pibroch.kernels.route import numba as routing
from pibroch.kernels.scatter_update.hyper import Hyper
from pibroch.kernels.scatter_update.numba import Grouped

ROWS_PER_THREAD = 128  # rows below which a further thread is not worth waking
NO_SCALE: NDArray[np.float32] = np.empty(0, np.float32)


def group_rows(row_ids: NDArray[np.int64]) -> Grouped:
    """Group rows that came in some order; position v's gradient is row v of the gradients."""
    num_ids = len(row_ids)
    rows, order, segments = np.empty(num_ids, np.int64), np.empty(num_ids, np.int32), np.empty(num_ids + 1, np.int32)
    count = grouping.dedupe(row_ids, rising(num_ids), rows, segments, order, 0, num_ids)
    segments[count] = num_ids
    return Grouped(rows[:count], segments[: count + 1], order, rising(num_ids), NO_SCALE)


@lru_cache(maxsize=16)
def rising(num_ids: int) -> NDArray[np.int32]:
    """0, 1, 2, ...; shared, not to be written to."""
    return np.arange(num_ids, dtype=np.int32)


def even_bounds(grouped: Grouped) -> list[int]:
    """Bounds that give each thread whole rows and about as many ids: a hot row counts for all its ids."""
    num_rows, num_ids = len(grouped.rows), len(grouped.order)
    parts = max(1, min(parallel.num_threads(), num_rows // ROWS_PER_THREAD))
    targets = [num_ids * part // parts for part in range(1, parts)]
    inner = np.searchsorted(grouped.segments, targets).tolist()
    return [0, *inner, num_rows]


def read_rows(
    shard: MemoryShard, optimizer: SparseOptimizer, row_ids: NDArray[np.int64], averaged_at: int | None
) -> Records:
    """Weights of rows ``[V, D]``, or their moving averages as of a step where the optimizer keeps some."""
    out = np.empty((len(row_ids), shard.dim), np.float32)
    if averaged_at is None or optimizer.average is None:
        parallel.run(routing.gather_rows, len(row_ids), shard.records, row_ids, out)
    else:
        first, decay = shard.column("average"), optimizer.average
        parallel.run(averaging.averaged_rows, len(row_ids), shard.records, row_ids, first, decay, averaged_at, out)
    return out


def update_rows(
    shard: MemoryShard, optimizer: SparseOptimizer, grouped: Grouped, gradients: Records, hyper: Hyper, step: int
) -> None:
    """Apply the optimizer once to each distinct row, with its moving average where one is kept.

    Args:
        shard: holds the rows, in its records or in the room behind them.
        optimizer: of the shard.
        grouped: rows of the shard, and which gradients belong to them.
        gradients: float32 ``[positions, D]``.
        hyper: of this step.
        step: number of this update, from 1.
    """
    if len(grouped.rows) == 0 or isinstance(optimizer, Frozen):
        return
    _advance_averages(shard, optimizer, grouped.rows, step - 1)
    kernel, bounds = type(optimizer).kernel, even_bounds(grouped)
    parallel.run_ranges(kernel, bounds, shard.space, grouped, gradients, hyper.as_float32())
    _advance_averages(shard, optimizer, grouped.rows, step)
    if shard.touched is not None:
        shard.touched[grouped.rows] = True


def _advance_averages(shard: MemoryShard, optimizer: SparseOptimizer, rows: NDArray[np.int64], step: int) -> None:
    """Bring the moving averages of the rows to ``step``, where averages are kept."""
    decay = optimizer.average
    if decay is not None:
        first = shard.column("average")
        parallel.run(averaging.advance, len(rows), shard.space, rows, shard.dim, first, decay, step)
