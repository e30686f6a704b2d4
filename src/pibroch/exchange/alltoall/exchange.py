"""When the messages of a step are sent: counts and ids go out, rows come back, gradients go out, all lanes' in four.

Ids of the next batch travel while the current one computes; its rows are fetched as soon as the gradients before them have
been applied, beside the rest of the backward pass, the dense optimizer and whatever the model computes before it asks for
its embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.errors import ConfigError, DataError
from pibroch.exchange.agreement import and_then_fillers, check_same_options
from pibroch.exchange.alltoall.group_lanes import GroupLanes
from pibroch.exchange.alltoall.lane import Lane, Route
from pibroch.exchange.alltoall.movement import RowMovement
from pibroch.exchange.base import Exchange, Rates, Report
from pibroch.exchange.messages import Talk, together
from pibroch.exchange.rows import room_for
from pibroch.exchange.wire import RowWire
from pibroch.kernels.arrays import Records
from pibroch.planner import Plan


@dataclass(frozen=True, slots=True, eq=False)
class Routed:
    """A batch that was looked up, with its routes through all lanes."""

    batch: JaggedBatch
    routes: Sequence[Route]


@dataclass(slots=True, eq=False)
class PendingBatch:
    """A batch, or a filler, on its way through the exchange; ``rows`` are under way once they were asked for."""

    batch: JaggedBatch
    is_real: bool
    routes: Future[list[Route]]
    rows: Future[list[Records]] | None = None


class AllToAllExchange(Exchange[Routed]):
    """Every rank holds a shard, and every rank takes part in every lookup, with an empty batch when it has no samples.

    Placement changes no bit of the results, but for column-wise tables under row-wise optimizers, which agree within rounding.

    Args:
        groups: all tables, with the lanes of each group.
        wire: of all lanes; its channel is this exchange's alone.
        groups_under: makes lanes for another plan, whose rows nobody has filled; ``None`` where rows do not move.
    """

    def __init__(
        self,
        groups: Sequence[GroupLanes],
        wire: RowWire,
        groups_under: Callable[[Plan], list[GroupLanes]] | None = None,
    ) -> None:
        self._wire, self._groups_under = wire, groups_under
        self._movement: RowMovement | None = None
        self._moved: Future[bool] | None = None
        self._num_to_update = 0
        self._use(groups)
        self._ranks, self._communication = wire.channel.ranks, wire.channel.ranks.communication
        self.reads_ahead = wire.channel.ranks.world_size > 1
        self.features = tuple(dict.fromkeys(name for each in groups for name in each.space.features))
        self._announced: list[PendingBatch] = []

    def _use(self, groups: Sequence[GroupLanes]) -> None:
        """Look up and update in these lanes from now on."""
        self.groups = groups
        self._lanes = [lane for each in groups for lane in each.lanes]
        self.shards = [lane.shard for lane in self._lanes]

    def feed(self, batches: Iterable[JaggedBatch], trains: bool) -> Iterator[JaggedBatch]:
        """See :class:`Exchange`; reads one batch further than it hands out and sends that one's ids.

        A rank that runs out of batches gets empty ones until all have: nobody waits for a rank that has stopped.
        """
        mine: list[PendingBatch] = []
        before: PendingBatch | None = None
        try:
            for batch, is_real in and_then_fillers(batches, self.features):
                if before is not None and not before.is_real and not _is_real_elsewhere(before):
                    return
                pending = self._announce(batch, is_real)
                mine = [*mine[-1:], pending]
                self._announced.append(pending)
                if before is not None:
                    yield before.batch
                before = pending
        finally:
            self._announced = [pending for pending in self._announced if pending not in mine]

    def lookup(self, batch: JaggedBatch, trains: bool, averaged_at: int | None = None) -> tuple[list[Tensor], Routed]:
        """See :class:`Exchange`."""
        pending = next((pending for pending in self._announced if pending.batch is batch), None)
        if pending is None:
            pending = self._announce(batch, True)
        else:
            self._announced.remove(pending)
        if pending.rows is None or averaged_at is not None:
            pending.rows = self._fetch(pending, averaged_at)
        with self._ranks.waiting():
            routes, rows = pending.routes.result(), pending.rows.result()
        self._num_to_update += trains
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
        self._num_to_update -= 1
        self._drop_fetched()

    def _deliver(self, updates: Sequence[Talk[None]]) -> None:
        """Carry out the updates of one step; on the communication thread."""
        together(self._wire, updates)

    def route(self, batch: JaggedBatch) -> Routed:
        """A handle for the update of a batch that was looked up otherwise; blocks. Every rank calls it."""
        return Routed(batch, self._announce(batch, True).routes.result())

    def fetch_next(self) -> None:
        """See :class:`Exchange`; rows that are to move do so after those that the next batch wants."""
        if self._moved is not None and self._moved.result() and self._num_to_update == 0:
            self._go_over()
        if self._announced and self._announced[0].rows is None:
            self._announced[0].rows = self._fetch(self._announced[0], None)
        if self._movement is not None:
            self._moved = self._communication.submit(self._movement.move_some)

    def move_to(self, plan: Plan, rows_per_step: int) -> None:
        """See :meth:`pibroch.Embeddings.move_rows`."""
        if self._groups_under is None or self._movement is not None:
            got = (
                "rows that do not move" if self._groups_under is None else "rows that are on their way to another plan"
            )
            raise ConfigError(
                got, "an exchange whose rows can move, and one plan at a time", "wait until is_moving is false"
            )
        options = {"rows_per_step": rows_per_step, "plan": plan.digest}
        self._communication.submit(lambda: check_same_options(self._wire.channel, options)).result()
        self._movement = RowMovement(self.groups, self._groups_under(plan), self._wire, rows_per_step)

    @property
    def is_moving(self) -> bool:
        """Whether rows are on their way to another plan's homes."""
        return self._movement is not None

    def _go_over(self) -> None:
        """Use the new homes: all rows are there but those updated lately."""
        movement = self._movement
        assert movement is not None, "asked for"
        self.flush()
        self._communication.submit(movement.move_rest).result()
        self._movement = self._moved = None
        self._use(movement.after)
        for pending in self._announced:
            pending.routes, pending.rows = self._submit_route(pending.batch, pending.is_real), None

    def flush(self) -> None:
        """See :class:`Exchange`."""
        self._communication.flush()

    def report(self) -> Report:
        """See :class:`Exchange`."""
        return Report(bytes_by_rank=dict(self._wire.channel.sent_to))

    def forget(self) -> None:
        """See :class:`Exchange`."""
        if self._movement is not None:
            self._communication.submit(self._movement.restart)
        self._drop_fetched()

    def _drop_fetched(self) -> None:
        for pending in self._announced:
            pending.rows = None

    def _announce(self, batch: JaggedBatch, is_real: bool) -> PendingBatch:
        return PendingBatch(batch, is_real, self._submit_route(batch, is_real))

    def _submit_route(self, batch: JaggedBatch, is_real: bool) -> Future[list[Route]]:
        def route() -> list[Route]:
            batch.validate()  # may have been written to since it was made
            return together(self._wire, [lane.route(batch, is_real) for lane in self._lanes])

        return self._communication.submit(route)

    def _fetch(self, pending: PendingBatch, averaged_at: int | None) -> Future[list[Records]]:
        def fetch() -> list[Records]:
            return together(self._wire, [route.fetch(averaged_at) for route in pending.routes.result()])

        return self._submit_fetch(fetch)

    def _submit_fetch(self, fetch: Callable[[], list[Records]]) -> Future[list[Records]]:
        """Let the communication thread fetch a batch's rows."""
        return self._communication.submit(fetch)


def _is_real_elsewhere(filler: PendingBatch) -> bool:
    try:
        return filler.routes.result()[0].is_real
    except DataError:  # a bad batch is no filler; the lookup says what is wrong
        return True
