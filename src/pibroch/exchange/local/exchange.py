"""The exchange of one process: every row is here. The reference for all others."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.embedding import MemoryShard, TableGroup
from pibroch.embedding.rows import read_rows, rising, update_rows
from pibroch.exchange.base import Exchange, Local, Rates, Setup, options_of
from pibroch.exchange.fresh_rows import fresh_in_space
from pibroch.exchange.rows import (
    BatchIds,
    group,
    pool,
    resolve,
    resolve_to_read,
    room_for,
    table_bounds,
)


class LocalExchange(Exchange[list[BatchIds]]):
    """Looks rows up in, and updates them in, this process's memory."""

    takes_raw_ids = True
    can_be_copied = True

    def __init__(self, groups: Sequence[TableGroup], seed: int | None) -> None:
        self._groups = groups
        self._held = [MemoryShard.whole(each.space.tables, each.optimizer, seed) for each in groups]
        self.shards = self._held

    @classmethod
    def build(cls, setup: Setup, **options: object) -> LocalExchange:
        """As users choose it; there are no options, and a channel of one rank is not needed."""
        options_of(Local, "local", options)
        return cls(setup.groups, setup.seed)

    def lookup(
        self, batch: JaggedBatch, trains: bool, averaged_at: int | None = None
    ) -> tuple[list[Tensor], list[BatchIds]]:
        """See :class:`Exchange`."""
        of_group = resolve if trains or averaged_at is not None else resolve_to_read
        resolved = [of_group(each, batch.pick(each.space.features)) for each in self._groups]
        for _, problem in resolved:
            if problem is not None:
                raise problem
        handle = [ids for ids, _ in resolved]
        self._begin(batch)
        room = room_for(self._groups, batch)
        return [
            self._pooled(number, ids, room, averaged_at) for number, ids in enumerate(handle)
        ], handle

    def _begin(self, batch: JaggedBatch) -> None:
        """Begin rows anew that do so with a batch."""
        for each, shard in zip(self._groups, self._held, strict=True):
            fresh = fresh_in_space(batch.fresh, each)
            if fresh is not None:
                fresh.begin(shard)

    def _pooled(
        self, number: int, ids: BatchIds, room: Tensor | None, averaged_at: int | None
    ) -> Tensor:
        each = self._groups[number]
        shard = self._held[number]
        records = shard.stored
        rows = ids.row_ids
        if averaged_at is not None:
            records = read_rows(shard, each.optimizer, ids.row_ids, averaged_at)
            rows = rising(len(ids.row_ids)).astype("int64")
        return pool(ids, records, rows, each.space.dim, room)

    def update(self, handle: list[BatchIds], gradients: Sequence[Tensor], rates: Rates) -> None:
        """See :class:`Exchange`."""
        for number, (each, shard) in enumerate(zip(self._groups, self._held, strict=True)):
            grouped = group(handle[number], table_bounds(handle[number]))
            hyper = each.optimizer.hyper(rates.learning_rates[number], rates.step)
            gradient_rows = handle[number].gradient_rows(gradients[number])
            update_rows(shard, each.optimizer, grouped, gradient_rows, hyper, rates.step)
