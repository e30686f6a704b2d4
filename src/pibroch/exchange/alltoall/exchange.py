"""The four messages of a step: counts and ids go out, rows come back, gradients go out.

Each carries what all lanes send. :data:`SCHEDULE` says which thread does what and when.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.errors import ConfigError
from pibroch.exchange.agreement import check_same_options
from pibroch.exchange.alltoall.group_lanes import GroupLanes, assemble, split
from pibroch.exchange.alltoall.lane import Lane, Route
from pibroch.exchange.alltoall.movement import RowMovement
from pibroch.exchange.base import MovesRows, Rates, Report
from pibroch.exchange.messages import Joined, joined
from pibroch.exchange.prefetching import FedStep, PrefetchingExchange
from pibroch.exchange.rows import room_for
from pibroch.exchange.schedule import Moment, Queue, Run, Runner, Schedule, Task
from pibroch.exchange.wire import RowWire
from pibroch.kernels.arrays import Records
from pibroch.planner import Plan

SCHEDULE = Schedule(
    Task("route", Queue.NETWORK, Moment.READ),
    Task("fetch", Queue.NETWORK, Moment.TURN, after=("route",)),
    Task("begin rows", Queue.NETWORK, Moment.LOOKUP, after=("fetch",), only_if="begins_rows"),
    Task("pool", Queue.CALLER, Moment.LOOKUP, after=("fetch",)),
    Task("combine", Queue.CALLER, Moment.GRADIENTS),
    Task("update", Queue.NETWORK, Moment.GRADIENTS, after=("combine",)),
)


class AllToAllExchange(PrefetchingExchange, MovesRows):
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
        self._runner = Runner(SCHEDULE, {Queue.NETWORK: self._communication}, RUNS)
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
    ) -> tuple[list[Tensor], FedStep]:
        """See :class:`Exchange`."""
        step = self._step_of(batch, averaged_at)
        self._num_to_update += trains
        self._runner.at(Moment.LOOKUP, self, step)
        return self.assemble(batch, step.tasks.pop("pool").result()), step

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

    def update(self, handle: FedStep, gradients: Sequence[Tensor], rates: Rates) -> None:
        """See :class:`Exchange`; returns when this rank's gradients are summed.

        The communication thread does the rest while the caller's backward pass goes on.
        """
        handle.gradients = gradients
        handle.rates = rates
        self._runner.at(Moment.GRADIENTS, self, handle)
        self._num_to_update -= 1
        self._drop_fetched()

    def drop(self, handle: FedStep, gradients: Sequence[Tensor]) -> None:
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
        for step in self._announced:
            step.tasks.clear()
            self._runner.at(Moment.READ, self, step)

    def forget(self) -> None:
        """See :class:`Exchange`."""
        if self._movement is not None:
            self._communication.submit(self._movement.restart)
        super().forget()

    def route(self, batch: JaggedBatch) -> FedStep:
        """A handle for the update of a batch that was looked up otherwise; blocks.

        The update must follow. Every rank calls it.
        """
        self._num_to_update += 1
        step = self._begin(batch, True)
        step.tasks["route"].result()
        return step

    def _may_fetch_early(self, batch: JaggedBatch) -> bool:
        return batch.fresh is None or not any(lane.begins_at_fetch for lane in self._lanes)

    def report(self) -> Report:
        """See :class:`Exchange`."""
        return Report(bytes_by_rank=dict(self.wire.channel.sent_to))

    def _is_real_on_some_rank(self, step: FedStep) -> bool:
        return _routes_of(step)[0].is_real


def _routes_of(step: FedStep) -> list[Route]:
    routes: list[Route] = step.tasks["route"].result()
    return routes


def _route(exchange: AllToAllExchange, step: FedStep) -> Joined[list[Route]]:
    step.batch.validate()  # may have been written to since it was made
    return joined([lane.route(step.batch, step.is_real) for lane in exchange.lanes])


def _fetch(_: AllToAllExchange, step: FedStep, routes: list[Route]) -> Joined[list[Records]]:
    return joined([route.fetch(step.averaged_at) for route in routes])


def _begin_rows(_: AllToAllExchange, step: FedStep, fetched: list[Records]) -> Joined[None]:
    for route in _routes_of(step):
        route.begin()
    yield from ()


def _pool(exchange: AllToAllExchange, step: FedStep) -> list[Tensor]:
    rows: list[Records] = step.tasks.pop("fetch").result()
    room = exchange.room_for(step.batch)
    return [route.pool(own, room) for route, own in zip(_routes_of(step), rows, strict=True)]


def _combine(exchange: AllToAllExchange, step: FedStep) -> list[Tensor]:
    gradients = exchange.split(step.batch, step.gradients)
    step.gradients = ()
    return [
        gradient[:0] if lane.is_frozen else route.combine(gradient)
        for route, lane, gradient in zip(_routes_of(step), exchange.lanes, gradients, strict=True)
    ]


def _update(
    exchange: AllToAllExchange, step: FedStep, totals: Sequence[Tensor]
) -> Joined[list[None]]:
    rates = step.rates
    assert rates is not None, "an update has them"
    of_lane = [
        rate
        for rate, each in zip(rates.learning_rates, exchange.groups, strict=True)
        for _ in each.lanes
    ]
    parts = zip(_routes_of(step), totals, of_lane, strict=True)
    return joined([route.update(total, rate, rates.step) for route, total, rate in parts])


RUNS: dict[str, Run] = {
    "route": _route,
    "fetch": _fetch,
    "begin rows": _begin_rows,
    "pool": _pool,
    "combine": _combine,
    "update": _update,
}
