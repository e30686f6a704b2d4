"""What every holder of rows does with the records of a shard: read them, and update each once."""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pibroch.embedding.optimizers import Frozen, SparseOptimizer
from pibroch.embedding.shard import MemoryShard
from pibroch.kernels import average as averaging
from pibroch.kernels import dedupe as grouping
from pibroch.kernels import narrow, parallel
from pibroch.kernels import route as routing
from pibroch.kernels.arrays import Records, Stored
from pibroch.kernels.scatter_update import Grouped, Hyper, Rounding

ROUNDS_STOCHASTICALLY = True
"""Whether updates round bfloat16 weights so, or (for comparisons alone) to the nearest."""
ROUNDING_SEED = 0x5EED
ROWS_PER_THREAD = 128  # rows below which a further thread is not worth waking
NO_SCALE: NDArray[np.float32] = np.empty(0, np.float32)
NO_ROWS: NDArray[np.int64] = np.empty(0, np.int64)


def group_rows(row_ids: NDArray[np.int64]) -> Grouped:
    """Group rows in any order; position v's gradient is row v of the gradients."""
    num_ids = len(row_ids)
    rows = np.empty(num_ids, np.int64)
    order = np.empty(num_ids, np.int32)
    segments = np.empty(num_ids + 1, np.int32)
    sequence = rising(num_ids)
    (count,) = grouping.dedupe(row_ids, sequence, [0, num_ids], rows, segments, order)
    segments[count] = num_ids
    return Grouped(rows[:count], segments[: count + 1], order, rising(num_ids), NO_SCALE)


@lru_cache(maxsize=16)
def rising(num_ids: int) -> NDArray[np.int32]:
    """0, 1, 2, ...; shared, not to be written to."""
    return np.arange(num_ids, dtype=np.int32)


def even_bounds(grouped: Grouped) -> list[int]:
    """Bounds that give each thread whole rows and about as many ids.

    A hot row counts for all its ids.
    """
    num_rows = len(grouped.rows)
    num_ids = len(grouped.order)
    parts = max(1, min(parallel.num_threads(), num_rows // ROWS_PER_THREAD))
    targets = [num_ids * part // parts for part in range(1, parts)]
    inner = np.searchsorted(grouped.segments, targets).tolist()
    return [0, *inner, num_rows]


class ReadableRows(Protocol):
    """What reading needs to know of a shard, see :class:`MemoryShard`."""

    @property
    def dim(self) -> int: ...  # noqa: D102
    @property
    def records(self) -> Records: ...  # noqa: D102
    @property
    def stored(self) -> Stored: ...  # noqa: D102
    def column(self, field: str, /) -> int: ...  # noqa: D102


def read_rows(
    shard: ReadableRows,
    optimizer: SparseOptimizer,
    row_ids: NDArray[np.int64],
    averaged_at: int | None,
    out: Records | None = None,
) -> Records:
    """Weights of rows ``[V, D]``, in ``out`` if given.

    Or their moving averages as of a step, where the optimizer keeps some.
    """
    if out is None:
        out = np.empty((len(row_ids), shard.dim), np.float32)
    if averaged_at is None or optimizer.average is None:
        routing.gather_rows(shard.stored, row_ids, out)
    else:
        how = shard.column("average"), optimizer.average, averaged_at
        averaging.averaged_rows(shard.records, shard.stored, row_ids, *how, out)
    return out


def update_rows(
    shard: MemoryShard,
    optimizer: SparseOptimizer,
    grouped: Grouped,
    gradients: Records,
    hyper: Hyper,
    step: int,
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
    how = grouped, gradients, hyper.as_float32()
    if shard.dtype == "float32":
        _advance_averages(shard, optimizer, grouped.rows, step - 1)
        parallel.run_ranges(type(optimizer).kernel, even_bounds(grouped), shard.space, *how)
        _advance_averages(shard, optimizer, grouped.rows, step)
    else:
        kernel = type(optimizer).narrow_kernel
        assert kernel is not None, "see group_tables"
        spaces = (shard.space, shard.stored_space)
        rounding = _rounding(shard, optimizer, grouped.rows, step)
        parallel.run_ranges(kernel, even_bounds(grouped), *spaces, *how, rounding)
    shard.mark(grouped.rows)


def _rounding(
    shard: MemoryShard, optimizer: SparseOptimizer, rows: NDArray[np.int64], step: int
) -> Rounding:
    """How a step's rows are rounded: by draws for the step and the table's columns."""
    first_columns = shard.first_columns(rows)
    num_columns = shard.dim + int(first_columns.max(initial=0))
    keys = np.empty(num_columns if ROUNDS_STOCHASTICALLY else 0, np.uint32)
    narrow.keys_of(step, ROUNDING_SEED, keys)
    decay = optimizer.average
    average_at = -1
    if decay is not None:  # in a record of float32
        average_at = shard.dim + sum(optimizer.moments(shard.dim).values())
    return Rounding(keys, first_columns, average_at, decay or 0.0, step)


def _advance_averages(
    shard: MemoryShard, optimizer: SparseOptimizer, rows: NDArray[np.int64], step: int
) -> None:
    """Bring the moving averages of the rows to ``step``, where averages are kept."""
    decay = optimizer.average
    if decay is not None:
        first = shard.column("average")
        averaging.advance(shard.space, rows, shard.dim, first, decay, step)
