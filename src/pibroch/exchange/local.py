"""The exchange of one process: every row is here. The reference for all others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.data.batch import one_hot_offsets
from pibroch.embedding import MemoryShard, RowSpace, SparseOptimizer
from pibroch.errors import RowIdError
from pibroch.exchange.base import Exchange
from pibroch.kernels import parallel
from pibroch.kernels.average import numba as averaging
from pibroch.kernels.dedupe import numba as grouping
from pibroch.kernels.gather_pool import numba as pooling
from pibroch.kernels.memory import can_stream
from pibroch.kernels.scatter_update.numba import Grouped

IDS_PER_THREAD = 4096  # ids below which a further thread is not worth waking to group them
ROWS_PER_THREAD = 128  # rows below which a further thread is not worth waking
NO_SCALE: NDArray[np.float32] = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class LookedUp:
    """What one lookup leaves for its update; shapes as in :mod:`pibroch.kernels.gather_pool.numba`."""

    row_ids: NDArray[np.int64]
    offsets: NDArray[np.int64]
    scale: NDArray[np.float32]
    one_hot: bool


class LocalExchange(Exchange):
    """Looks rows up in, and updates them in, this process's memory."""

    def __init__(self, row_space: RowSpace, optimizer: SparseOptimizer, seed: int) -> None:
        self.row_space = row_space
        self.optimizer = optimizer
        self.shard = MemoryShard.whole(row_space.tables, optimizer, seed)
        self.shards = (self.shard,)

    def lookup(self, batch: JaggedBatch, averaged_at: int | None = None) -> tuple[Tensor, LookedUp]:
        """See :class:`Exchange`."""
        space = self.row_space
        offsets, values = batch.offsets.numpy(), batch.values.numpy()
        row_ids = np.empty(len(values), np.int64)
        bad = pooling.resolve_rows(values, offsets, space.first_row_of_feature, space.num_rows_of_feature, row_ids)
        if bad >= 0:
            raise row_id_error(space, batch, int(bad))
        num_bags = len(offsets) - 1
        looked_up = LookedUp(row_ids, offsets, self._scale(batch), is_one_hot(batch))
        records, rows = self.shard.records, row_ids
        if averaged_at is not None:
            records, rows = self._averages(row_ids, averaged_at), rising(len(row_ids)).astype(np.int64)
        pooled_BFD = torch.empty(batch.batch_size, len(space.features), space.dim)
        out = pooled_BFD.numpy()
        parallel.run(pooling.gather_pool, num_bags, records, rows, offsets, looked_up.scale, out, can_stream(out))
        return pooled_BFD, looked_up

    def update(self, looked_up: LookedUp, gradient_BFD: Tensor, learning_rate: float, step: int) -> None:
        """See :class:`Exchange`."""
        num_ids = len(looked_up.row_ids)
        if num_ids == 0:
            return
        grouped = group(looked_up, self.row_space)
        gradients = gradient_BFD.numpy().reshape(-1, self.row_space.dim)
        hyper, bounds = self.optimizer.hyper(learning_rate, step).as_float32(), even_bounds(grouped)
        self._advance_averages(grouped.rows, step - 1)
        parallel.run_ranges(type(self.optimizer).kernel, bounds, self.shard.records, grouped, gradients, hyper)
        self._advance_averages(grouped.rows, step)
        if self.shard.touched is not None:
            self.shard.touched[grouped.rows] = True

    def _advance_averages(self, rows: NDArray[np.int64], step: int) -> None:
        """Bring the moving averages of the rows to ``step``, where averages are kept."""
        decay, dim = self.optimizer.average, self.row_space.dim
        if decay is not None:
            first = self.shard.column("average")
            parallel.run(averaging.advance, len(rows), self.shard.records, rows, dim, first, decay, step)

    def _averages(self, row_ids: NDArray[np.int64], step: int) -> NDArray[np.float32]:
        """Moving averages of the rows at ``step``, ``[V, D]``."""
        averages = np.empty((len(row_ids), self.row_space.dim), np.float32)
        first, decay = self.shard.column("average"), self.optimizer.average
        parallel.run(averaging.averaged_rows, len(row_ids), self.shard.records, row_ids, first, decay, step, averages)
        return averages

    def _scale(self, batch: JaggedBatch) -> NDArray[np.float32]:
        """Factor of each id in its bag's sum, or empty when all are 1."""
        mean = self.row_space.mean_of_feature
        if batch.weights is None and not mean.any():
            return NO_SCALE
        weights = NO_SCALE if batch.weights is None else batch.weights.detach().contiguous().float().numpy()
        scale = np.empty(batch.values.numel(), np.float32)
        pooling.pooling_scale(batch.offsets.numpy(), weights, mean, scale)
        return scale


def group(looked_up: LookedUp, space: RowSpace) -> Grouped:
    """Group a batch's positions by row, each row's in sample order."""
    num_ids, num_features = len(looked_up.row_ids), len(space.features)
    if space.shares_tables:
        sequence = np.empty(num_ids, np.int32)
        grouping.sample_major_sequence(looked_up.offsets, num_features, sequence)
    else:
        sequence = rising(num_ids)
    rows, order, segments = np.empty(num_ids, np.int64), np.empty(num_ids, np.int32), np.empty(num_ids, np.int32)
    bounds = table_bounds(looked_up, space)
    counts = parallel.run_ranges(grouping.dedupe, bounds, looked_up.row_ids, sequence, rows, segments, order)
    spans = [slice(start, start + count) for start, count in zip(bounds, counts, strict=False)]
    rows = np.concatenate([rows[span] for span in spans])
    segments = np.concatenate([*(segments[span] for span in spans), [np.int32(num_ids)]], dtype=np.int32)
    if looked_up.one_hot:
        source = one_hot_sources(num_ids, num_features)
    else:
        source = np.empty(num_ids, np.int32)
        pooling.gradient_sources(looked_up.offsets, num_features, source)
    return Grouped(rows, segments, order, source, looked_up.scale)


def table_bounds(looked_up: LookedUp, space: RowSpace) -> list[int]:
    """Bounds of positions for each thread to group: whole tables, about as many ids each."""
    num_ids = len(looked_up.row_ids)
    parts = 1 if space.shares_tables else max(1, min(parallel.num_threads(), num_ids // IDS_PER_THREAD))
    if parts == 1:
        return [0, num_ids]
    num_samples = (len(looked_up.offsets) - 1) // len(space.features)
    begins = looked_up.offsets[::num_samples]
    nearest = np.searchsorted(begins, [num_ids * part // parts for part in range(1, parts)])
    return [0, *sorted({int(begins[place]) for place in nearest} - {0, num_ids}), num_ids]


def even_bounds(grouped: Grouped) -> list[int]:
    """Bounds that give each thread whole rows and about as many ids: a hot row counts for all its ids."""
    num_rows, num_ids = len(grouped.rows), len(grouped.order)
    parts = max(1, min(parallel.num_threads(), num_rows // ROWS_PER_THREAD))
    targets = [num_ids * part // parts for part in range(1, parts)]
    inner = np.searchsorted(grouped.segments, targets).tolist()
    return [0, *inner, num_rows]


def row_id_error(space: RowSpace, batch: JaggedBatch, position: int) -> RowIdError:
    """The error for the id at ``position`` of the batch's values."""
    bag = int(np.searchsorted(batch.offsets.numpy(), position, side="right")) - 1
    feature, sample = divmod(bag, batch.batch_size)
    return RowIdError(
        f"id {int(batch.values[position])} for feature {space.features[feature]!r} in sample {sample} of the batch",
        f"an id from 0 to {int(space.num_rows_of_feature[feature]) - 1}",
        "encode the data with the table's vocabulary, or give the table more rows",
    )


def is_one_hot(batch: JaggedBatch) -> bool:
    """Whether every bag holds exactly one id; at once for batches whose offsets are the shared ones of such batches."""
    offsets = batch.offsets
    if offsets.data_ptr() == one_hot_offsets(offsets.numel() - 1).data_ptr():
        return True
    return batch.values.numel() == offsets.numel() - 1 and bool((batch.lengths() == 1).all())


@lru_cache(maxsize=16)
def rising(num_ids: int) -> NDArray[np.int32]:
    """0, 1, 2, ...; shared, not to be written to."""
    return np.arange(num_ids, dtype=np.int32)


@lru_cache(maxsize=16)
def one_hot_sources(num_ids: int, num_features: int) -> NDArray[np.int32]:
    """:func:`~pibroch.kernels.gather_pool.numba.gradient_sources` of bags with one id each; shared."""
    return np.ascontiguousarray(np.arange(num_ids, dtype=np.int32).reshape(-1, num_features).T).ravel()
