"""Rows on servers, for lookups that nothing was planned for: weights come in one round, gradients go in another.

Shape legend: B samples of this rank, F features of the lane, D its width, V ids, U distinct rows, S servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pibroch.collectives import Channel
from pibroch.data import JaggedBatch
from pibroch.embedding import SparseOptimizer
from pibroch.exchange.grouping import BatchIds, group
from pibroch.exchange.layout import LaneLayout
from pibroch.exchange.row_lane import RowLane
from pibroch.exchange.wire import Wire
from pibroch.kernels import parallel
from pibroch.kernels.route import numba as routing
from pibroch.kernels.scatter_update.numba import Grouped
from pibroch.servers.client import Homes, Parcel

Records = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Route:
    """What a batch's ids led to.

    Attributes:
        ids: of this rank's part of the batch; rows are addresses.
        grouped: the same by distinct address, rising.
        places: int64 ``[V]``, the number of each position's address among the distinct ones.
        share: this rank's share of the global batch.
        is_real: whether some rank's part is one of its own batches, and not a filler after its last one.
    """

    ids: BatchIds
    grouped: Grouped
    places: NDArray[np.int64]
    share: float
    is_real: bool


class ServerLane(RowLane):
    """All homes are on servers, whose shards come after those of the ranks, which are empty.

    Args:
        layout: of the lane.
        optimizer: of all tables.
        seed: of the initial weights.
        channel: to the other ranks, for the communication thread's use.
        wire: to whose type rows and gradients are rounded, as between ranks; to and from servers they travel as float32.
        spare_rows: room for rows that are not at home.
        servers: names of workers of this process's RPC group.
    """

    def __init__(
        self, layout: LaneLayout, optimizer: SparseOptimizer, seed: int, channel: Channel, wire: Wire,
        spare_rows: int, servers: Sequence[str],
    ) -> None:  # fmt: skip
        super().__init__(layout, optimizer, seed, channel, wire, spare_rows)
        held, bounds = layout.pieces[self.world_size :], layout.bounds[self.world_size :]
        self.homes = Homes(servers, held, bounds, layout.width, optimizer, seed, channel)

    def route(self, batch: JaggedBatch, is_real: bool = True) -> Any:
        """See :class:`Lane`: a :class:`Route`."""
        ids, problem = self.resolve(batch.select(self.layout.features))
        said = [[-1 if problem else batch.batch_size, is_real]] * self.world_size
        told = self._tell(torch.tensor(said), problem)
        grouped, places = group(ids), np.empty(len(ids.row_ids), np.int64)
        parallel.run(routing.places, len(grouped.rows), grouped, places)
        share = batch.batch_size / max(1, int(told[:, 0].sum()))
        return Route(ids, grouped, places, share, bool(told[:, 1].any()))

    def fetch(self, route: Any, averaged_at: int | None) -> Records:
        """The distinct rows ``[U, D]``, in the order of their addresses."""
        homes, wanted = self.homes, self._parcel(route)
        nothing = homes.no_rows()
        answers = homes.exchange(nothing, np.empty(0, np.float32), nothing, wanted, averaged_at)
        rows = np.empty((len(wanted.rows), self.layout.width), np.float32)
        homes.collect(answers, (self.layout.width * wanted.counts).tolist(), rows.ravel())
        return self.wire.rounded(rows)

    def update(self, route: Any, totals: Tensor, learning_rate: float, step: int) -> None:
        """See :class:`Lane`."""
        self.homes.update(self._parcel(route), self.wire.rounded(totals.numpy()), learning_rate, step)

    def _parcel(self, route: Route) -> Parcel:
        return self.homes.parcel(route.grouped.rows)
