"""What every exchange does with the rows of a shard: read them, pool them, update each once."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.embedding import MemoryShard, SparseOptimizer
from pibroch.errors import RowIdError
from pibroch.exchange.grouping import BatchIds, even_bounds
from pibroch.kernels import parallel
from pibroch.kernels.average import numba as averaging
from pibroch.kernels.gather_pool import numba as pooling
from pibroch.kernels.memory import can_stream
from pibroch.kernels.route import numba as routing
from pibroch.kernels.scatter_update.hyper import Hyper
from pibroch.kernels.scatter_update.numba import Grouped

Records = NDArray[np.float32]


def pool(ids: BatchIds, records: Records, rows: NDArray[np.int64], dim: int) -> Tensor:
    """Pooled embeddings float32 ``[B, F, D]`` from ``records`` ``[rows, W]``, position v from record ``rows[v]``."""
    pooled_BFD = torch.empty(ids.num_samples, ids.num_features, dim)
    out, num_bags = pooled_BFD.numpy(), len(ids.offsets) - 1
    parallel.run(pooling.gather_pool, num_bags, records, rows, ids.offsets, ids.scale, out, can_stream(out))
    return pooled_BFD


def read_rows(
    shard: MemoryShard, optimizer: SparseOptimizer, row_ids: NDArray[np.int64], averaged_at: int | None
) -> Records:
    """Weights of rows ``[V, D]``, or their moving averages as of a step."""
    out = np.empty((len(row_ids), shard.dim), np.float32)
    if averaged_at is None:
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
    if len(grouped.rows) == 0:
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


def row_id_error(
    features: tuple[str, ...], num_rows: NDArray[np.int64], batch: JaggedBatch, position: int
) -> RowIdError:
    """The error for the id at ``position`` of the batch's values; ``num_rows`` ``[F]`` of the features' tables."""
    bag = int(np.searchsorted(batch.offsets.numpy(), position, side="right")) - 1
    feature, sample = divmod(bag, batch.batch_size)
    return RowIdError(
        f"id {int(batch.values[position])} for feature {features[feature]!r} in sample {sample} of the batch",
        f"an id from 0 to {int(num_rows[feature]) - 1}",
        "encode the data with the table's vocabulary, or give the table more rows",
    )
