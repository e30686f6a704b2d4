"""The exchange of one process: every row is here. The reference for all others."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.embedding import MemoryShard, RowSpace, SparseOptimizer
from pibroch.embedding.rows import read_rows, rising, update_rows
from pibroch.exchange.base import Exchange
from pibroch.exchange.grouping import BatchIds, group, is_one_hot, pooling_scale, table_bounds
from pibroch.exchange.rows import pool, row_id_error
from pibroch.kernels import parallel
from pibroch.kernels.gather_pool import numba as pooling

BAGS_PER_THREAD = 8192  # bags below which a further thread is not worth waking to look at their ids


class LocalExchange(Exchange):
    """Looks rows up in, and updates them in, this process's memory."""

    def __init__(self, row_space: RowSpace, optimizer: SparseOptimizer, seed: int) -> None:
        self.row_space = row_space
        self.optimizer = optimizer
        self.shard = MemoryShard.whole(row_space.tables, optimizer, seed)
        self.shards = (self.shard,)

    def lookup(self, batch: JaggedBatch, trains: bool, averaged_at: int | None = None) -> tuple[Tensor, BatchIds]:
        """See :class:`Exchange`."""
        space = self.row_space
        offsets, values = batch.offsets.numpy(), batch.values.numpy()
        row_ids = np.empty(len(values), np.int64)
        bad = parallel.run(
            pooling.resolve_rows, len(offsets) - 1, values, offsets, space.first_row_of_feature,
            space.num_rows_of_feature, row_ids, grain=BAGS_PER_THREAD,
        )  # fmt: skip
        if max(bad) >= 0:
            first_bad = min(position for position in bad if position >= 0)
            raise row_id_error(space.features, space.num_rows_of_feature, batch, first_bad)
        scale = pooling_scale(batch, space.mean_of_feature)
        ids = BatchIds(row_ids, offsets, scale, is_one_hot(batch), len(space.features), space.shares_tables)
        records, rows = self.shard.records, row_ids
        if averaged_at is not None:
            records = read_rows(self.shard, self.optimizer, row_ids, averaged_at)
            rows = rising(len(row_ids)).astype(np.int64)
        return pool(ids, records, rows, space.dim), ids

    def update(self, looked_up: BatchIds, gradient_BFD: Tensor, learning_rate: float, step: int) -> None:
        """See :class:`Exchange`."""
        grouped = group(looked_up, table_bounds(looked_up))
        gradients = gradient_BFD.numpy().reshape(-1, self.row_space.dim)
        hyper = self.optimizer.hyper(learning_rate, step)
        update_rows(self.shard, self.optimizer, grouped, gradients, hyper, step)
