"""What a lane inside a group of hosts does for the ranks that its members serve, one by one.

A member looks up the batches of several ranks, its **slots**. Within a slot all is as in
:mod:`pibroch.exchange.alltoall`; what differs is the update: an owner adds the gradients of all
ranks of the run in their order, wherever they were summed, so that the numbers are those of
``alltoall`` to the bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from pibroch.embedding.rows import group_rows, update_rows
from pibroch.exchange.alltoall.column_norms import needs_whole_rows, with_whole_rows
from pibroch.exchange.alltoall.lane import Lane, Route
from pibroch.exchange.alltoall.pooled_lane import BagRoute, PooledLane
from pibroch.exchange.alltoall.row_lane import RowLane, RowRoute
from pibroch.exchange.messages import Messages
from pibroch.kernels import scatter_update as updating
from pibroch.kernels.arrays import Ints, Records

L = TypeVar("L", bound=Lane)
S = TypeVar("S", bound=Route)
N = TypeVar("N", Ints, Records)
Order = Sequence[tuple[int, int]]
"""For every rank of the run the member that serves it, and its slot there."""


class LaneSlots(ABC, Generic[L, S]):
    """A batch's way through one lane.

    Args:
        lane: inside the group.
        routes: of each slot.
        order: of the ranks.
    """

    def __init__(self, lane: L, routes: Sequence[S], order: Order) -> None:
        self.lane = lane
        self.routes = routes
        self.order = order

    @abstractmethod
    def combine(self, slot: int, gradient: Tensor, share: float) -> Tensor:
        """What owners need of the gradient of a slot's embeddings."""

    @abstractmethod
    def send(self, slot: int, sums: Tensor) -> Messages[Records]:
        """Send it to the owners; returns what this member received, by member."""

    @abstractmethod
    def apply(
        self, received: Sequence[Records], shares: Sequence[float], rate: float, step: int
    ) -> Messages[None]:
        """Update each touched row of this member once.

        Args:
            received: by :meth:`send`, for each slot.
            shares: by which gradients of each rank are to be multiplied, where :meth:`combine` did
                not.
            rate: of the update.
            step: its number.
        """

    @property
    def num_columns(self) -> int:
        """Floats of a vector that travels."""
        return self.lane.layout.width


class RowSlots(LaneSlots[RowLane, RowRoute]):
    """Rows travel inside the group: one gradient for each distinct row of a slot."""

    def __init__(self, lane: RowLane, routes: Sequence[RowRoute], order: Order) -> None:
        super().__init__(lane, routes, order)
        rows_given = [_split(route.rows_given, route.counts_given) for route in routes]
        self._updates = group_rows(
            np.concatenate([rows_given[slot][member] for member, slot in order])
        )

    def combine(self, slot: int, gradient: Tensor, share: float) -> Tensor:
        """See :class:`LaneSlots`."""
        return torch.from_numpy(self.routes[slot].here.sums(gradient, share))

    def send(self, slot: int, sums: Tensor) -> Messages[Records]:
        """See :class:`LaneSlots`."""
        route = self.routes[slot]
        return (yield from self.lane.carry(sums, route.counts_wanted, route.counts_given))

    def apply(
        self, received: Sequence[Records], shares: Sequence[float], rate: float, step: int
    ) -> Messages[None]:
        """See :class:`LaneSlots`."""
        lane = self.lane
        optimizer = self.lane.optimizer
        parts = [
            _split(rows, route.counts_given)
            for rows, route in zip(received, self.routes, strict=True)
        ]
        gradients = np.concatenate([parts[slot][member] for member, slot in self.order])
        updates = self._updates
        hyper = optimizer.hyper(rate, step)
        if needs_whole_rows(lane.layout, optimizer):
            updates, gradients, hyper = yield from with_whole_rows(
                lane.layout, lane.rank, lane.shard, updates, gradients, hyper
            )
        update_rows(lane.shard, optimizer, updates, gradients, hyper, step)


class BagSlots(LaneSlots[PooledLane, BagRoute]):
    """Pooled vectors travel inside the group: one gradient for each bag."""

    def __init__(self, lane: PooledLane, routes: Sequence[BagRoute], order: Order) -> None:
        super().__init__(lane, routes, order)
        self._updates = group_rows(
            np.concatenate([routes[slot].grouped[member].rows for member, slot in order])
        )

    def combine(self, slot: int, gradient: Tensor, share: float) -> Tensor:
        """See :class:`LaneSlots`; owners multiply."""
        return self.routes[slot].combine(gradient)

    def send(self, slot: int, sums: Tensor) -> Messages[Records]:
        """See :class:`LaneSlots`."""
        route = self.routes[slot]
        own = self.lane.bags_of(route.num_samples[self.lane.rank])
        return (yield from self.lane.carry(sums, own, [len(ids.offsets) - 1 for ids in route.bags]))

    def apply(
        self, received: Sequence[Records], shares: Sequence[float], rate: float, step: int
    ) -> Messages[None]:
        """See :class:`LaneSlots`."""
        parts = [
            _split(vectors, [len(ids.offsets) - 1 for ids in route.bags])
            for vectors, route in zip(received, self.routes, strict=True)
        ]
        totals = []
        for (member, slot), share in zip(self.order, shares, strict=True):
            grouped = self.routes[slot].grouped[member]
            total = np.empty((len(grouped.rows), self.num_columns), np.float32)
            updating.sum_gradients(parts[slot][member], grouped, share, total)
            totals.append(total)
        optimizer = self.lane.optimizer
        hyper = optimizer.hyper(rate, step)
        update_rows(self.lane.shard, optimizer, self._updates, np.concatenate(totals), hyper, step)
        yield from ()  # a generator that sends nothing


AnySlots = RowSlots | BagSlots


def slots_of(lane: Lane, routes: Sequence[Route], order: Order) -> AnySlots:
    """A batch's way through a lane of either kind."""
    if isinstance(lane, PooledLane):
        return BagSlots(lane, [route for route in routes if isinstance(route, BagRoute)], order)
    assert isinstance(lane, RowLane), "the other kind"
    return RowSlots(lane, [route for route in routes if isinstance(route, RowRoute)], order)


def _split(rows: N, counts: Sequence[int]) -> list[N]:
    ends = np.cumsum([0, *counts])
    return [rows[ends[p] : ends[p + 1]] for p in range(len(counts))]
