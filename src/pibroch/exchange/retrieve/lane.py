"""A lane whose rows are read where they are, by whoever maps their memory or asks for them.

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
from pibroch.exchange.retrieve.copies import CopyRows, LaneCopies
from pibroch.exchange.retrieve.host_memory import NeighbourRows
from pibroch.exchange.rows import DistinctRows, pool
from pibroch.kernels.arrays import Ints, Records, RowIds


class RetrieveLane(RowLane):
    """See the module.

    Attributes:
        near: the shards of this host, by rank, this one's included.
        copies: of this host, where there are some.
        copied: these, by number behind that of the last rank.
    """

    near: dict[int, MemoryShard | NeighbourRows]
    copies: LaneCopies | None = None
    copied: Mapping[int, CopyRows] = MappingProxyType({})

    def wanted(self, batch: JaggedBatch, *, by_copies: bool) -> WantedRows:
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
        return WantedRows.of(self, DistinctRows.of(ids), copies)


@dataclass(frozen=True, slots=True)
class WantedRows:
    """What a batch reads of a lane.

    Rows are held by ranks 0 to W - 1, and behind them by this host's copies.

    Attributes:
        lane: of the rows.
        addresses: int64 ``[U]``, rising.
        bounds: first address of each holder, and the end.
        ends: of each holder's rows among them.
        rows: float32 ``[U, D]``, to be filled.
        here: the batch, by distinct row; ``None`` where no batch wants them.
    """

    lane: RetrieveLane
    addresses: Ints
    bounds: Ints
    ends: Ints
    rows: Records
    here: DistinctRows | None = None

    @classmethod
    def of(
        cls, lane: RetrieveLane, here: DistinctRows, copies: LaneCopies | None = None
    ) -> WantedRows:
        """Of a batch whose addresses are those of a lane, or of a lane with copies."""
        bounds = lane.layout.bounds if copies is None else copies.bounds
        return cls.at(lane, here.grouped.rows, bounds, here)

    @classmethod
    def at(
        cls, lane: RetrieveLane, addresses: Ints, bounds: Ints, here: DistinctRows | None = None
    ) -> WantedRows:
        """Of rising addresses."""
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

    def question(self, p: int) -> RowIds:
        """A rank's rows as they travel."""
        return self.offsets(p).astype(self.lane.id_type)

    def part(self, holder: int) -> Records:
        """Where a holder's rows come to lie."""
        return self.rows[self.ends[holder] : self.ends[holder + 1]]

    def holders(self) -> Sequence[int]:
        """From which rows are wanted."""
        return [int(p) for p in np.flatnonzero(np.diff(self.ends))]

    def read_near(self, averaged_at: int | None) -> None:
        """Fill in the rows of this host."""
        lane = self.lane
        for holder in self.holders():
            found = lane.near.get(holder) if holder < lane.world_size else lane.copied[holder]
            if found is not None:
                part = self.part(holder)
                read_rows(found, lane.optimizer, self.offsets(holder), averaged_at, part)
                if not lane.wire.is_exact:  # as rows that travel, so that places change no bit
                    part[:] = lane.wire.rounded(part)

    def pool(self, room_BS: Tensor | None) -> Tensor:
        """The embeddings, see :meth:`Route.pool`."""
        assert self.here is not None, "of a batch"
        return pool(self.here.ids, self.rows, self.here.places, self.lane.layout.width, room_BS)
