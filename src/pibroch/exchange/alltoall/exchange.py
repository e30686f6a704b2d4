"""The four messages of a step: counts and ids go out, rows come back, gradients go out.

Each carries what all lanes send. The communication thread sends them; what they overlap with is
said in :mod:`pibroch.exchange.prefetching`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.errors import ConfigError
from pibroch.exchange.agreement import check_same_options
from pibroch.exchange.alltoall.group_lanes import GroupLanes, assemble, split
from pibroch.exchange.alltoall.lane import Lane, Route
from pibroch.exchange.alltoall.movement import RowMovement
from pibroch.exchange.base import Rates, Report
from pibroch.exchange.messages import together
from pibroch.exchange.prefetching import PrefetchingExchange
from pibroch.exchange.rows import room_for
from pibroch.exchange.wire import RowWire
from pibroch.kernels.arrays import Records
from pibroch.planner import Plan


@dataclass(frozen=True, slots=True, eq=False)
class Routed:
    """A batch that was looked up, with its routes through all lanes."""

    batch: JaggedBatch
    routes: Sequence[Route]


class AllToAllExchange(PrefetchingExchange[Routed, "list[Route]", "list[Records]"]):
    """Every rank holds a shard, and takes part in every lookup, also without samples.

    Placement changes no bit of the results, but for column-wise tables under row-wise optimizers,
    which agree within rounding.

    Args:
        groups: all tables, with the lanes of each group.
        wire: of all lanes; its channel is this exchange's alone.
        groups_under: makes lanes for another plan, whose rows nobody has filled; ``None`` where
            rows do not move.
    """

    takes_raw_ids = True

    def __init__(
        self,
        groups: Sequence[GroupLanes],
        wire: RowWire,
        groups_under: Callable[[Plan], list[GroupLanes]] | None = None,
    ) -> None:
        super().__init__(
            wire.channel,
            tuple(dict.fromkeys(name for each in groups for name in each.space.features)),
        )
        self.wire = wire
        self._groups_under = groups_under
        self._movement: RowMovement | None = None
        self._moved: Future[bool] | None = None
        self._num_to_update = 0
        self._use(groups)

    def _use(self, groups: Sequence[GroupLanes]) -> None:
        """Look up and update in these lanes from now on."""
        self.groups = groups
        self._lanes = [lane for each in groups for lane in each.lanes]
        self.shards = [lane.shard for lane in self._lanes]

    def lookup(
        self, batch: JaggedBatch, trains: bool, averaged_at: int | None = None
    ) -> tuple[list[Tensor], Routed]:
        """See :class:`Exchange`."""
        routes, rows = self.fetched(batch, averaged_at)
        self._num_to_update += trains
        if batch.fresh is not None:
            self._communication.submit(partial(_begin, routes))
        room = self.room_for(batch)
        pooled = [route.pool(fetched, room) for route, fetched in zip(routes, rows, strict=True)]
        return self.assemble(batch, pooled), Routed(batch, routes)

    @property
    def lanes(self) -> Sequence[Lane]:
        """The lanes of all groups of tables, in the groups' order."""
        return self._lanes

    def room_for(self, batch: JaggedBatch) -> Tensor | None:
        """Memory for a batch's pooled embeddings, see :func:`pibroch.exchange.rows.room_for`."""
        return room_for([each.tables for each in self.groups], batch)

    def assemble(self, batch: JaggedBatch, pooled: Sequence[Tensor]) -> list[Tensor]:
        """The embeddings of each group from those of all lanes."""
        return assemble(self.groups, batch, pooled)

    def split(self, batch: JaggedBatch, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The inverse of :meth:`assemble`, for gradients."""
        return split(self.groups, batch, gradients)

    def update(self, handle: Routed, gradients: Sequence[Tensor], rates: Rates) -> None:
        """See :class:`Exchange`; returns when this rank's gradients are summed.

        The communication thread does the rest while the caller's backward pass goes on.
        """
        parts = zip(handle.routes, self._lanes, self.split(handle.batch, gradients), strict=True)
        sums = [
            gradient[:0] if lane.is_frozen else route.combine(gradient)
            for route, lane, gradient in parts
        ]
        of_lane = [
            rate
            for rate, each in zip(rates.learning_rates, self.groups, strict=True)
            for _ in each.lanes
        ]

        def deliver() -> None:
            updates = zip(handle.routes, sums, of_lane, strict=True)
            together(
                self.wire,
                [route.update(totals, rate, rates.step) for route, totals, rate in updates],
            )

        self._communication.submit(deliver)
        self._num_to_update -= 1
        self._drop_fetched()

    def drop(self, handle: Routed, gradients: Sequence[Tensor]) -> None:
        """See :class:`Exchange`."""
        self._num_to_update -= 1

    def fetch_next(self) -> None:
        """See :class:`Exchange`; rows move to new homes behind those that the next batch reads."""
        if self._moved is not None and self._moved.result() and self._num_to_update == 0:
            self._go_over()
        super().fetch_next()
        if self._movement is not None:
            self._moved = self._communication.submit(self._movement.move_some)

    def move_to(self, plan: Plan, rows_per_step: int) -> None:
        """See :meth:`pibroch.Embeddings.move_rows`."""
        if self._groups_under is None or self._movement is not None:
            got = (
                "rows that do not move"
                if self._groups_under is None
                else "rows on their way to another plan"
            )
            need = "an exchange whose rows can move, and one plan at a time"
            raise ConfigError(got, need, "wait until is_moving is false")
        options = {"rows_per_step": rows_per_step, "plan": plan.digest}
        self._communication.submit(lambda: check_same_options(self.wire.channel, options)).result()
        self._movement = RowMovement(
            self.groups, self._groups_under(plan), self.wire, rows_per_step
        )

    @property
    def is_moving(self) -> bool:
        """Whether rows are on their way to another plan's homes."""
        return self._movement is not None

    def _go_over(self) -> None:
        """Use the new homes: all rows are there but those updated since they were sent."""
        movement = self._movement
        assert movement is not None, "asked for"
        self.flush()
        self._communication.submit(movement.move_rest).result()
        self._movement = self._moved = None
        self._use(movement.after)
        for pending in self._announced:
            pending.routes = self.announce(pending.batch, pending.is_real).routes
            pending.rows = None

    def forget(self) -> None:
        """See :class:`Exchange`."""
        if self._movement is not None:
            self._communication.submit(self._movement.restart)
        super().forget()

    def route(self, batch: JaggedBatch) -> Routed:
        """A handle for the update of a batch that was looked up otherwise; blocks.

        The update must follow. Every rank calls it.
        """
        self._num_to_update += 1
        return Routed(batch, self.announce(batch, True).routes.result())

    def _route(self, batch: JaggedBatch, is_real: bool) -> list[Route]:
        return together(self.wire, [lane.route(batch, is_real) for lane in self._lanes])

    def _may_fetch_early(self, batch: JaggedBatch) -> bool:
        return batch.fresh is None or not any(lane.begins_at_fetch for lane in self._lanes)

    def _fetch(self, routes: list[Route], averaged_at: int | None) -> list[Records]:
        return together(self.wire, [route.fetch(averaged_at) for route in routes])

    def report(self) -> Report:
        """See :class:`Exchange`."""
        return Report(bytes_by_rank=dict(self.wire.channel.sent_to))

    def _is_real_on_some_rank(self, routes: list[Route]) -> bool:
        return routes[0].is_real


def _begin(routes: Sequence[Route]) -> None:
    for route in routes:
        route.begin()
