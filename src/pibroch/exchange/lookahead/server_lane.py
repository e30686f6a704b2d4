"""Rows on servers, for lookups that were not planned.

Weights come in one round, gradients go in another.

Shape legend: B samples of this rank, F features of the lane, D its width, V ids, U distinct rows, S
servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.embedding import TableGroup
from pibroch.exchange.alltoall.lane import Route
from pibroch.exchange.alltoall.row_lane import DistinctRoute, RowLane
from pibroch.exchange.fresh_rows import FreshRecords
from pibroch.exchange.layout import LaneLayout
from pibroch.exchange.messages import Messages
from pibroch.exchange.rows import DistinctRows
from pibroch.exchange.wire import RowWire
from pibroch.kernels.arrays import Records
from pibroch.servers.client import EmbeddingServers, RowsByServer


@dataclass(frozen=True, slots=True)
class ServerRoute(DistinctRoute):
    """What a batch's ids led to on the servers of a lane.

    Attributes:
        lane: whose servers these are.
        fresh: all rows of it that begin anew with the batch.
    """

    lane: ServerLane
    fresh: FreshRecords | None

    def fetch(self, averaged_at: int | None) -> Messages[Records]:
        """The distinct rows ``[U, D]``, in the order of their addresses."""
        servers = self.lane.servers
        rows_by_server = self._rows()
        width = self.lane.layout.width
        nothing = servers.no_rows()
        home = nothing
        records = np.empty(0, np.float32)
        if self.fresh is not None and self.lane.rank == 0:  # once
            home = servers.rows_by_server(self.fresh.rows)
            records = self.fresh.records().ravel()
        pending = servers.exchange(home, records, nothing, rows_by_server, averaged_at)
        rows = np.empty((len(rows_by_server.rows), width), np.float32)
        servers.collect(pending, (width * rows_by_server.counts).tolist(), rows.ravel())
        if self.fresh is not None:
            self.fresh.show(rows_by_server.rows, rows)
        yield from ()  # a generator that sends the other ranks nothing
        return self.lane.wire.rounded(rows)

    def update(self, gradients: Tensor, learning_rate: float, step: int) -> Messages[None]:
        """See :class:`Route`."""
        if self.lane.is_frozen:
            return
        self.lane.servers.update(
            self._rows(), self.lane.wire.rounded(gradients.numpy()), learning_rate, step
        )
        yield from ()

    def _rows(self) -> RowsByServer:
        return self.lane.servers.rows_by_server(self.here.grouped.rows)


class ServerLane(RowLane):
    """All homes are on servers, whose shards come after those of the ranks, which are empty.

    Args:
        layout: of the lane.
        group: of its tables.
        seed: of the initial weights.
        wire: to whose type rows and gradients are rounded, as between ranks; to and from servers
            they travel as float32.
        spare_rows: room for rows that are not at home.
        names: of the servers, workers of this process's RPC group.
    """

    begins_at_fetch = True

    def __init__(
        self,
        layout: LaneLayout,
        group: TableGroup,
        seed: int | None,
        wire: RowWire,
        spare_rows: int,
        names: Sequence[str],
    ) -> None:
        super().__init__(layout, group, seed, wire, spare_rows)
        pieces = layout.pieces[self.world_size :]
        bounds = layout.bounds[self.world_size :]
        self.servers = EmbeddingServers(
            names, pieces, bounds, layout.width, layout.dtype, self.optimizer, seed, self.channel
        )

    def route(self, batch: JaggedBatch, is_real: bool = True) -> Messages[Route]:
        """See :class:`Lane`."""
        ids, problem = self.resolve(batch.pick(self.layout.features))
        heads = [[-1 if problem else batch.batch_size, is_real]] * self.world_size
        received = yield from self.exchange_heads(torch.tensor(heads), problem)
        share = batch.batch_size / max(1, int(received[:, 0].sum()))
        is_real = bool(received[:, 1].any())
        return ServerRoute(DistinctRows.of(ids), share, is_real, self, self.fresh(batch))
