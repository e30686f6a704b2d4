"""The exchange of one process: every row is here. The reference for all others."""

from __future__ import annotations

from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.embedding import MemoryShard, RowSpace, SparseOptimizer
from pibroch.embedding.rows import read_rows, rising, update_rows
from pibroch.exchange.base import Exchange, NoOptions, Setup, options_of
from pibroch.exchange.rows import BatchIds, group, pool, resolve, table_bounds


class LocalExchange(Exchange[BatchIds]):
    """Looks rows up in, and updates them in, this process's memory."""

    def __init__(self, row_space: RowSpace, optimizer: SparseOptimizer, seed: int) -> None:
        self.row_space, self.optimizer = row_space, optimizer
        self.shard = MemoryShard.whole(row_space.tables, optimizer, seed)
        self.shards = (self.shard,)

    @classmethod
    def build(cls, setup: Setup, **options: object) -> LocalExchange:
        """As users choose it; there are no options, and a channel of one rank is not needed."""
        options_of(NoOptions, "local", options)
        return cls(setup.row_space, setup.optimizer, setup.seed)

    def lookup(self, batch: JaggedBatch, trains: bool, averaged_at: int | None = None) -> tuple[Tensor, BatchIds]:
        """See :class:`Exchange`."""
        ids, problem = resolve(self.row_space, batch)
        if problem is not None:
            raise problem
        records, rows = self.shard.records, ids.row_ids
        if averaged_at is not None:
            records = read_rows(self.shard, self.optimizer, ids.row_ids, averaged_at)
            rows = rising(len(ids.row_ids)).astype("int64")
        return pool(ids, records, rows, self.row_space.dim), ids

    def update(self, handle: BatchIds, gradient_BFD: Tensor, learning_rate: float, step: int) -> None:
        """See :class:`Exchange`."""
        grouped = group(handle, table_bounds(handle))
        gradients = gradient_BFD.numpy().reshape(-1, self.row_space.dim)
        hyper = self.optimizer.hyper(learning_rate, step)
        update_rows(self.shard, self.optimizer, grouped, gradients, hyper, step)
