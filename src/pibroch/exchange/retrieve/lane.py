"""A lane whose rows are read where they are, by ranks that map their memory or send requests.

Shape legend: D width, U distinct rows, W ranks, H of this host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.embedding import MemoryShard
from pibroch.embedding.rows import read_rows
from pibroch.exchange.alltoall.row_lane import RowLane
from pibroch.exchange.retrieve.copies import LaneCopies
from pibroch.exchange.retrieve.host_memory import HostMemory, SharedRows
from pibroch.exchange.rows import DistinctRows, pool
from pibroch.kernels.arrays import Bytes, Ints, Records


class RetrieveLane(RowLane):
    """A lane over the rows of this rank, with those that its host shares.

    Attributes:
        near: the shards of this host, by rank, this one's included.
        copies: of this host, where there are some.
        copied: these, by number behind that of the last rank.
    """

    near: dict[int, MemoryShard | SharedRows]
    copies: LaneCopies | None = None
    copied: Mapping[int, SharedRows] = MappingProxyType({})

    def wanted_rows(self, batch: JaggedBatch, *, by_copies: bool) -> WantedRows:
        """The distinct rows of a batch of at least the lane's features, checked.

        Raises:
            RowIdError: for an id outside its table.
        """
        copies = self.copies if by_copies else None
        ids, problem = self.resolve(
            batch.pick(self.layout.features), None if copies is None else copies.homes
        )
        if problem is not None:
            raise problem
        here = DistinctRows.of(ids)
        bounds = self.layout.bounds if copies is None else copies.bounds
        return WantedRows.at(self, here.grouped.rows, bounds, here)


@dataclass(frozen=True, slots=True)
class WantedRows:
    """The rows of a lane that a batch reads, and room for them.

    They are held by ranks 0 to W - 1, and behind them by this host's copies.

    Attributes:
        lane: of the rows.
        addresses: int64 ``[U]``, rising.
        bounds: first address of each holder, and the end.
        ends: of each holder's rows among them.
        rows: float32 ``[U, D]``, to be filled.
        here: the batch, by distinct row; ``None`` for rows that are read for copies.
    """

    lane: RetrieveLane
    addresses: Ints
    bounds: Ints
    ends: Ints
    rows: Records
    here: DistinctRows | None = None

    @classmethod
    def at(
        cls, lane: RetrieveLane, addresses: Ints, bounds: Ints, here: DistinctRows | None = None
    ) -> WantedRows:
        """The rows at rising addresses."""
        ends: Ints = np.searchsorted(addresses, bounds)
        return cls(
            lane,
            addresses,
            bounds,
            ends,
            np.empty((len(addresses), lane.layout.width), np.float32),
            here,
        )

    def offsets(self, holder: int) -> Ints:
        """A holder's rows, as places in its memory."""
        first: Ints = (
            self.addresses[self.ends[holder] : self.ends[holder + 1]] - self.bounds[holder]
        )
        return first

    def part(self, holder: int) -> Records:
        """The room for a holder's rows."""
        return self.rows[self.ends[holder] : self.ends[holder + 1]]

    def holders(self) -> Sequence[int]:
        """Those that hold some of the rows."""
        return [int(p) for p in np.flatnonzero(np.diff(self.ends))]

    def read_near(self, averaged_at: int | None) -> None:
        """Fill in the rows of this host."""
        lane = self.lane
        for holder in self.holders():
            readable = lane.near.get(holder) if holder < lane.world_size else lane.copied[holder]
            if readable is not None:
                part = self.part(holder)
                read_rows(readable, lane.optimizer, self.offsets(holder), averaged_at, part)
                if not lane.wire.is_exact:  # as rows that travel, so that places change no bit
                    part[:] = lane.wire.rounded(part)

    def pool(self, room_BS: Tensor | None) -> Tensor:
        """The embeddings, see :meth:`Route.pool`."""
        assert self.here is not None, "of a batch"
        return pool(self.here.ids, self.rows, self.here.places, self.lane.layout.width, room_BS)


def share(host: HostMemory, lanes: Sequence[RetrieveLane]) -> None:
    """Give each lane the shards and the copies of this host."""
    own = {
        lane: _room_for_copies(host, lane, lane.copies) for lane in lanes if lane.copies is not None
    }
    memory = host.trade()
    for number, lane in enumerate(lanes):
        lane.near = {lane.rank: lane.shard}
        for p, of_rank in memory.items():
            num_rows = int(np.diff(lane.layout.bounds)[p])
            records = _records(of_rank[number], num_rows, lane.shard.records.shape[1])
            lane.near[p] = SharedRows.of(records, lane.shard.dim, lane.shard.dtype, lane.shard)
        lane.near = dict(sorted(lane.near.items()))
    for number, (lane, room) in enumerate(own.items(), len(lanes)):
        copies = lane.copies
        dim = lane.layout.width
        assert copies is not None, "chosen by it"
        copied = {}
        for holder, p in enumerate(lane.near):
            shape = len(copies.sources[holder]), copies.width(dim)
            rows = room if p == lane.rank else _records(memory[p][number], *shape)
            copied[lane.world_size + holder] = SharedRows.of(rows, dim, copies.dtype)
        lane.copied = copied


def _room_for_copies(host: HostMemory, lane: RetrieveLane, copies: LaneCopies) -> Records:
    own = sorted((*host.neighbours, lane.rank)).index(lane.rank)
    return host.room(len(copies.sources[own]), copies.width(lane.layout.width))


def _records(memory: Bytes, num_rows: int, width: int) -> Records:
    return memory[: 4 * num_rows * width].view(np.float32).reshape(num_rows, width)
