"""When the messages of a step are sent: counts and ids go out, rows come back, gradients go out, all lanes' in four.

What overlaps with what says :mod:`pibroch.exchange.prefetching`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.exchange.alltoall.group_lanes import GroupLanes
from pibroch.exchange.alltoall.lane import Lane, Route
from pibroch.exchange.base import Rates, Report
from pibroch.exchange.messages import Talk, together
from pibroch.exchange.prefetching import PrefetchingExchange
from pibroch.exchange.rows import room_for
from pibroch.exchange.wire import RowWire
from pibroch.kernels.arrays import Records


@dataclass(frozen=True, slots=True, eq=False)
class Routed:
    """A batch that was looked up, with its routes through all lanes."""

    batch: JaggedBatch
    routes: Sequence[Route]


class AllToAllExchange(PrefetchingExchange[Routed, "list[Route]", "list[Records]"]):
    """Every rank holds a shard, and every rank takes part in every lookup, with an empty batch when it has no samples.

    Placement changes no bit of the results, but for column-wise tables under row-wise optimizers, which agree within rounding.

    Args:
        groups: all tables, with the lanes of each group.
        wire: of all lanes; its channel is this exchange's alone.
    """

    def __init__(self, groups: Sequence[GroupLanes], wire: RowWire) -> None:
        super().__init__(wire.channel, tuple(dict.fromkeys(name for each in groups for name in each.space.features)))
        self.groups, self.wire = groups, wire
        self._lanes = [lane for each in groups for lane in each.lanes]
        self.shards = [lane.shard for lane in self._lanes]

    def lookup(self, batch: JaggedBatch, trains: bool, averaged_at: int | None = None) -> tuple[list[Tensor], Routed]:
        """See :class:`Exchange`."""
        routes, rows = self.found(batch, averaged_at)
        room = self.room_for(batch)
        pooled = [route.pool(fetched, room) for route, fetched in zip(routes, rows, strict=True)]
        return self.assemble(batch, pooled), Routed(batch, routes)

    @property
    def lanes(self) -> Sequence[Lane]:
        """Of all groups, in their order."""
        return self._lanes

    def room_for(self, batch: JaggedBatch) -> Tensor | None:
        """For a batch's pooled embeddings, see :func:`pibroch.exchange.rows.room_for`."""
        return room_for([each.tables for each in self.groups], batch)

    def assemble(self, batch: JaggedBatch, pooled: Sequence[Tensor]) -> list[Tensor]:
        """The embeddings of each group from those of all lanes."""
        parts = iter(pooled)
        return [each.assemble(batch, [next(parts) for _ in each.lanes]) for each in self.groups]

    def split(self, batch: JaggedBatch, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The inverse of :meth:`assemble`, for gradients."""
        pairs = zip(self.groups, gradients, strict=True)
        return [part for each, gradient in pairs for part in each.split(batch, gradient)]

    def update(self, handle: Routed, gradients: Sequence[Tensor], rates: Rates) -> None:
        """See :class:`Exchange`; returns when this rank's gradients are summed, the rest goes on beside the caller."""
        parts = zip(handle.routes, self._lanes, self.split(handle.batch, gradients), strict=True)
        sums = [gradient[:0] if lane.is_frozen else route.combine(gradient) for route, lane, gradient in parts]
        of_lane = [rate for rate, each in zip(rates.learning_rates, self.groups, strict=True) for _ in each.lanes]

        def deliver() -> None:
            updates = zip(handle.routes, sums, of_lane, strict=True)
            self._deliver([route.update(totals, rate, rates.step) for route, totals, rate in updates])

        self._communication.submit(deliver)
        self._drop_fetched()

    def _deliver(self, updates: Sequence[Talk[None]]) -> None:
        """Carry out the updates of one step; on the communication thread."""
        together(self.wire, updates)

    def route(self, batch: JaggedBatch) -> Routed:
        """A handle for the update of a batch that was looked up otherwise; blocks. Every rank calls it."""
        return Routed(batch, self.announce(batch, True).routes.result())

    def _route(self, batch: JaggedBatch, is_real: bool) -> list[Route]:
        return together(self.wire, [lane.route(batch, is_real) for lane in self._lanes])

    def _fetch(self, routes: list[Route], averaged_at: int | None) -> list[Records]:
        return together(self.wire, [route.fetch(averaged_at) for route in routes])

    def report(self) -> Report:
        """See :class:`Exchange`."""
        return Report(bytes_by_rank=dict(self.wire.channel.sent_to))

    def _is_real_on_some_rank(self, routes: list[Route]) -> bool:
        return routes[0].is_real
