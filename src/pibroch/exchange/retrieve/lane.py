"""A lane whose rows are read where they are, by whoever maps their memory or asks for them.

Shape legend: D width, U distinct rows, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.embedding import MemoryShard
from pibroch.embedding.rows import read_rows
from pibroch.exchange.alltoall.row_lane import RowLane, RowRoute
from pibroch.exchange.messages import Talk
from pibroch.exchange.retrieve.host_memory import NeighbourRows
from pibroch.exchange.rows import DistinctRows, pool
from pibroch.kernels.arrays import Ints, Records, RowIds


@dataclass(frozen=True, slots=True)
class RetrieveRoute(RowRoute):
    """As :class:`RowRoute`, but rows of this host are read by who wants them."""

    lane: RetrieveLane

    def fetch(self, averaged_at: int | None) -> Talk[Records]:
        """See :class:`Route`; neighbours' rows have all updates before this step, see :class:`RetrieveExchange`."""
        lane, wanted = self.lane, self.wanted
        counts = [0 if p in lane.near else count for p, count in enumerate(self.asked_counts)]
        coming = [0 if p in lane.near else count for p, count in enumerate(wanted)]
        ends = np.cumsum([0, *self.asked_counts])
        asked = [self.asked[ends[p] : ends[p + 1]] for p in range(lane.world_size) if p not in lane.near]
        rows = read_rows(lane.shard, lane.optimizer, np.concatenate([self.asked[:0], *asked]), averaged_at)
        came = yield from lane.carry(torch.from_numpy(rows), counts, coming)
        found = WantedRows.of(lane, self.here)
        found.read_near(averaged_at)
        first = 0
        for p, count in enumerate(coming):
            found.part(p)[:count] = came[first : first + count]
            first += count
        return found.rows


class RetrieveLane(RowLane):
    """See the module.

    Attributes:
        near: the shards of this host, by rank, this one's included.
    """

    route_type = RetrieveRoute
    near: dict[int, MemoryShard | NeighbourRows]

    def wanted(self, batch: JaggedBatch) -> WantedRows:
        """The distinct rows of a batch of at least the lane's features, checked.

        Raises:
            RowIdError: for an id outside its table.
        """
        ids, problem = self.resolve(batch.pick(self.layout.features))
        if problem is not None:
            raise problem
        return WantedRows.of(self, DistinctRows.of(ids))


@dataclass(frozen=True, slots=True)
class WantedRows:
    """What a batch reads of a lane.

    Attributes:
        lane: of the rows.
        here: the batch, by distinct row.
        ends: of each rank's rows among them, ``[W + 1]``.
        rows: float32 ``[U, D]``, to be filled.
    """

    lane: RetrieveLane
    here: DistinctRows
    ends: Ints
    rows: Records

    @classmethod
    def of(cls, lane: RetrieveLane, here: DistinctRows) -> WantedRows:
        """Of a batch."""
        addresses = here.grouped.rows
        ends: Ints = np.searchsorted(addresses, lane.layout.bounds)
        return cls(lane, here, ends, np.empty((len(addresses), lane.layout.width), np.float32))

    def offsets(self, p: int) -> Ints:
        """A rank's rows, as places in its shard."""
        first: Ints = self.here.grouped.rows[self.ends[p] : self.ends[p + 1]] - self.lane.layout.bounds[p]
        return first

    def question(self, p: int) -> RowIds:
        """The same as they travel."""
        return self.offsets(p).astype(self.lane.id_type)

    def part(self, p: int) -> Records:
        """Where a rank's rows come to lie."""
        return self.rows[self.ends[p] : self.ends[p + 1]]

    def ranks(self) -> Sequence[int]:
        """From which rows are wanted."""
        return [int(p) for p in np.flatnonzero(np.diff(self.ends))]

    def read_near(self, averaged_at: int | None) -> None:
        """Fill in the rows of this host."""
        for p, shard in self.lane.near.items():
            part = self.part(p)
            if len(part):
                read_rows(shard, self.lane.optimizer, self.offsets(p), averaged_at, part)
                if not self.lane.wire.is_exact:  # as rows that travel, so that places change no bit
                    part[:] = self.lane.wire.rounded(part)

    def pool(self, room_BS: Tensor | None) -> Tensor:
        """The embeddings, see :meth:`Route.pool`."""
        return pool(self.here.ids, self.rows, self.here.places, self.lane.layout.width, room_BS)
