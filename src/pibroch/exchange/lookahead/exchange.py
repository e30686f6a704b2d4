"""Lookahead training (BagPipe, SOSP'23).

Rows lie where they are needed next, so little is waited for.

What travels and when is decided in :mod:`pibroch.exchange.lookahead.oracle`, carried out by
:mod:`pibroch.exchange.lookahead.carrier`; the order of things is kept by
:mod:`pibroch.exchange.lookahead.window`. Here each event of the window becomes a task.

Methods run on the training thread unless they say otherwise; what they submit to
``_planner_thread`` or ``_communication`` runs there, in the order of submission. The README of this
package has a table of who runs what. Batches that are not planned are looked up as in an all-to-all
exchange over the same rows, after all records were written home. Why:
``docs/design/0005-lookahead.md``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from torch import Tensor

from pibroch.collectives.task_thread import TaskThread
from pibroch.data import JaggedBatch
from pibroch.embedding import Shard
from pibroch.errors import ConfigError
from pibroch.exchange.agreement import and_then_fillers
from pibroch.exchange.alltoall.exchange import AllToAllExchange, Routed
from pibroch.exchange.alltoall.row_lane import RowLane
from pibroch.exchange.base import Exchange, Rates, Report
from pibroch.exchange.fresh_rows import FreshRecords
from pibroch.exchange.lookahead.announcement import Announcement, Announcer, Prepared, prepare
from pibroch.exchange.lookahead.carrier import Carrier, arrivals
from pibroch.exchange.lookahead.oracle import StepPlan
from pibroch.exchange.lookahead.oracle.kernels.window import Transfer
from pibroch.exchange.lookahead.oracle.thread import pass_on
from pibroch.exchange.lookahead.planners import Planner
from pibroch.exchange.lookahead.window import FeedWindow, Reach
from pibroch.exchange.messages import together
from pibroch.exchange.rows import pool
from pibroch.kernels.arrays import Ints, Records
from pibroch.kernels.scatter_update import Hyper
from pibroch.observability.trace import span
from pibroch.planner import Plan

_ANNOUNCED_AFTER = 2
"""Steps after which a batch's announcement is there without waiting."""


@dataclass(frozen=True, slots=True)
class PlannedLanes:
    """All that stands on where rows are; made anew when rows have moved.

    Attributes:
        lanes: one for each group of tables.
        shards: in this rank's care.
        carriers: of the lanes' records.
        planner: the way to an oracle that knows the homes.
    """

    lanes: Sequence[RowLane]
    shards: Sequence[Shard]
    carriers: Sequence[Carrier]
    planner: Planner


@dataclass(slots=True, eq=False)
class Step:
    """One batch, from its reading to the end of its updates.

    The training thread makes it and passes it to tasks of the other threads. A field that another
    thread writes is read only after the future that says so: ``announced``, ``plan`` and ``places``
    bring their own value, ``local`` says that the planner thread is done with ``gradients``.

    Attributes:
        batch: this rank's part.
        is_real: unless it is a filler after this rank's last batch.
        feed: number of its feed.
        announced: what all ranks say about it.
        number: among the steps that the oracle gets, from 1.
        plan: of what happens after it, for each lane.
        places: where its rows are read, for each lane, once they are there.
        num_fetched: how many of its rows other ranks have sent, or will send, for it.
        gradients: this rank's sums and room for those of other ranks, for each lane, once computed.
        hyper: of its update, for each lane; ``None`` where nothing is updated.
        update: its number, from 1.
        fresh: rows that begin anew with it, for each lane.
        local: done when the rows that this rank alone touched are updated.
    """

    batch: JaggedBatch
    is_real: bool
    feed: int
    announced: Future[Announcement] = field(default_factory=Future)
    number: int = 0
    plan: Future[list[StepPlan]] = field(default_factory=Future)
    places: Future[list[Ints]] = field(default_factory=Future)
    num_fetched: int = 0
    gradients: list[Records] = field(default_factory=list)
    hyper: Sequence[Hyper | None] = field(default_factory=list)
    update: int = 0
    fresh: Sequence[FreshRecords | None] = field(default_factory=list)
    local: Future[None] = field(default_factory=Future)


class LookaheadExchange(Exchange[Step | Routed]):
    """Records move to the ranks that need them next.

    Updates cross before the next step only where another rank waits.

    Args:
        unplanned: over the same rows, for what is not planned.
        planned: what stands on where rows are.
        announcer: announces batches that were read to the other ranks.
        planner_thread: on which the planner keeps its oracle; other tasks run between.
        lookahead: batches that are read ahead.
        planned_now: what stands on where ``unplanned`` has its rows now; ``None`` where they do not
            move.
    """

    takes_raw_ids = True

    def __init__(
        self,
        unplanned: AllToAllExchange,
        planned: PlannedLanes,
        announcer: Announcer,
        planner_thread: TaskThread,
        lookahead: int,
        planned_now: Callable[[], PlannedLanes] | None = None,
    ) -> None:
        self._unplanned = unplanned
        self._wire = unplanned.wire
        self._announcer = announcer
        self.reads_ahead = unplanned.reads_ahead
        self._planned_now = planned_now
        self._has_moved = False
        self._last_feed = 0
        self._use(planned)
        self._ranks = self._wire.channel.ranks
        self._planner_thread = planner_thread
        self._communication = self._ranks.communication
        self._window: FeedWindow[Step] = FeedWindow(lookahead)
        self._done = Report(lookahead=lookahead)

    def _use(self, planned: PlannedLanes) -> None:
        """Plan over these from now on."""
        self._lanes = planned.lanes
        self.shards = planned.shards
        self._planner = planned.planner
        self.caches = self._carriers = planned.carriers

    def feed(self, batches: Iterable[JaggedBatch], trains: bool) -> Iterator[JaggedBatch]:
        """See :class:`Exchange`; reads ``lookahead`` batches ahead and announces them to all ranks.

        It begins with a few, and reads large ones less far, see :class:`Reach`.
        """
        if not trains:
            yield from self._unplanned.feed(batches, trains)
            return
        self._leave_plan()
        feed = self._begin_feed()
        reach = Reach(self._window.lookahead)
        ahead = deque[Step]()
        announcing = deque[Step]()
        for batch, is_real in and_then_fillers(batches, self._unplanned.features):
            step = Step(batch, is_real, feed)
            self._window.read(step)
            if len(ahead) <= reach.steps + 1 or self._window.feed != feed:
                self._announce_read()
            ahead.append(step)
            announcing.append(step)
            if len(announcing) > _ANNOUNCED_AFTER:
                reach.batch_takes(announcing.popleft().announced.result().num_bytes)
            # two more than planned: a plan is made one step early, and is to wait for no message
            while len(ahead) > reach.steps + 2:
                yield ahead.popleft().batch
                reach.step_begins()
                feed = self._begin_again(feed, ahead)
                # at the same place on all ranks, whose batches may end at different steps
                self._announce_read()
            if not is_real and not step.announced.result().is_real:
                ahead.pop()
                break
        while ahead:
            yield ahead.popleft().batch
            feed = self._begin_again(feed, ahead)

    def _begin_feed(self) -> int:
        self._last_feed = self._window.begin_feed()
        self._has_moved = False
        if self.is_moving:
            self._window.leave()
        return self._last_feed

    def _begin_again(self, feed: int, ahead: deque[Step]) -> int:
        """Where rows have moved since, plan what is left of a feed over their new homes.

        Returns the number of the feed from now on.
        """
        if not self._has_moved or feed != self._last_feed:
            return feed
        feed = self._begin_feed()
        for number, step in enumerate(ahead):
            ahead[number] = Step(step.batch, step.is_real, feed)
            self._window.read(ahead[number])
        return feed

    def lookup(
        self, batch: JaggedBatch, trains: bool, averaged_at: int | None = None
    ) -> tuple[list[Tensor], Step | Routed]:
        """See :class:`Exchange`."""
        step = self._window.take(batch) if trains else None
        if step is not None:
            return self._lookup_planned(step), step
        leave = self._leave_plan if trains else self._write_home
        leave()
        return self._unplanned.lookup(batch, trains, averaged_at)

    def _lookup_planned(self, step: Step) -> list[Tensor]:
        announced = step.announced.result()
        if self._window.open():
            self._open(step)
        if announced.problem is not None:
            nothing = [np.empty((0, lane.layout.width), np.float32) for lane in self._lanes]
            self._finish(step, nothing, Rates([0.0] * len(self._lanes), 0))
            self.fetch_next()
            raise announced.problem
        with self._ranks.waiting(), span("wait for rows"):
            places = step.places.result()
        self._done.rows_read += sum(map(len, places))
        self._done.rows_fetched += step.num_fetched
        lanes = list(zip(self._carriers, announced.here.lanes, places, strict=True))
        with span("pool"):
            if step.batch.fresh is not None:
                for carrier, here, rows in lanes:
                    if here.fresh is not None:
                        carrier.show(here.fresh, here.grouped.rows, rows)
            room = self._unplanned.room_for(step.batch)
            pooled = [
                pool(here.ids, *carrier.read(rows, here.row_of_position), carrier.shard.dim, room)
                for carrier, here, rows in lanes
            ]
        self._window.fly(step)
        return self._unplanned.assemble(step.batch, pooled)

    def update(self, handle: Step | Routed, gradients: Sequence[Tensor], rates: Rates) -> None:
        """See :class:`Exchange`; returns when this rank's gradients are summed.

        The other threads do the rest while the caller's backward pass goes on.
        """
        if not isinstance(handle, Step):
            self._leave_plan()
            self._unplanned.update(handle, gradients, rates)
        elif not self._window.update(handle):  # the plan was left since
            self._unplanned.update(self._unplanned.route(handle.batch), gradients, rates)
        else:
            self._finish(handle, self._gradient_rows(handle, gradients), rates)

    def drop(self, handle: Step | Routed, gradients: Sequence[Tensor]) -> None:
        """See :class:`Exchange`; what was planned goes on, but for the updates."""
        if not isinstance(handle, Step):
            self._unplanned.drop(handle, gradients)
        elif self._window.update(handle):
            self._finish(handle, self._gradient_rows(handle, gradients), None)

    def _gradient_rows(self, step: Step, gradients: Sequence[Tensor]) -> list[Records]:
        """For each lane."""
        lanes = step.announced.result().here.lanes
        parts = self._unplanned.split(step.batch, gradients)
        return [lane.ids.gradient_rows(part) for lane, part in zip(lanes, parts, strict=True)]

    def _finish(self, step: Step, gradients: Sequence[Records], rates: Rates | None) -> None:
        """Sum a step's gradients, and submit what is done with the sums.

        Without ``rates`` nothing is updated.
        """
        with span("wait for plan"):
            plans = step.plan.result()
            announced = step.announced.result()
        self._count_planned(plans)
        lanes = zip(self._carriers, announced.here.lanes, gradients, plans, strict=True)
        with span("sum gradients"):
            step.gradients = [
                carrier.sums(here.grouped, gradient, announced.share, plan)
                for carrier, here, gradient, plan in lanes
            ]
        if rates is None:
            step.hyper = [None] * len(self._carriers)
        else:
            step.hyper = [
                carrier.hyper(rate, rates.step)
                for carrier, rate in zip(self._carriers, rates.learning_rates, strict=True)
            ]
            step.update = rates.step
        step.fresh = [here.fresh for here in announced.here.lanes]
        self._window.finish(step)
        # Both threads update rows now, and never the same: `local` ones concern this rank alone.
        # `_settle` waits for them, since rows that go home afterwards may be among them.
        step.local = self._planner_thread.submit(partial(self._update_local, step, plans))
        num_sums = [len(here.grouped.rows) for here in announced.here.lanes]
        self._communication.submit(partial(self._synchronise, step, plans, num_sums))

    def _update_local(self, step: Step, plans: Sequence[StepPlan]) -> None:
        """Update the rows that this rank alone touched; on the planner thread."""
        for carrier, plan, gradients, hyper, fresh in zip(
            self._carriers, plans, step.gradients, step.hyper, step.fresh, strict=True
        ):
            carrier.apply(plan.local, gradients, hyper, step.update, "local", fresh)

    def _synchronise(self, step: Step, plans: Sequence[StepPlan], num_sums: Sequence[int]) -> None:
        """Send the gradients of rows that the next step reads, and update those owned here.

        It runs on the communication thread, beside the rest of the backward pass.
        """
        lanes = zip(
            self._carriers, plans, step.gradients, num_sums, step.hyper, step.fresh, strict=True
        )
        with span("critical gradients"):
            together(
                self._wire,
                [
                    carrier.update(
                        plan.critical, gradients, first, hyper, step.update, "critical", fresh
                    )
                    for carrier, plan, gradients, first, hyper, fresh in lanes
                ],
            )
        self._settle(step, plans, is_tight=True)

    def _settle(self, step: Step, plans: Sequence[StepPlan], is_tight: bool) -> None:
        """The rest of a step's plan: deferred updates, records that go home, rows read later.

        On the communication thread. In lanes that are tight (short of slots) it comes before the
        rows of the next step, in the others after them, beside the next forward pass.
        """
        lanes = zip(self._carriers, plans, step.gradients, step.hyper, step.fresh, strict=True)
        chosen = [
            carrier.settle(plan, gradients, hyper, step.update, fresh)
            for carrier, plan, gradients, hyper, fresh in lanes
            if plan.is_tight == is_tight
        ]
        if chosen:
            step.local.result()  # of the planner thread, which waits for nothing
            with span("settle"):
                together(self._wire, chosen)

    def fetch_next(self) -> None:
        """See :class:`Exchange`: submits rows for the next step, then what can wait.

        The order of submission is the order of messages, the same on all ranks.
        """
        step = self._window.deliver()
        if step is None:
            was_moving = self.is_moving
            self._unplanned.fetch_next()
            if was_moving and not self.is_moving:
                self._plan_over_new_homes()
            return
        plans = step.plan.result()

        def deliver() -> list[Ints]:
            self._carry("critical", [plan.next_step for plan in plans])
            return [plan.places for plan in plans]

        arrived = self._communication.submit(deliver)
        if not all(plan.is_tight for plan in plans):
            self._communication.submit(partial(self._settle, step, plans, is_tight=False))
        # Now, as the training thread is about to wait for sums of dense gradients, and the planner
        # thread may have the core.
        self._announce_read()
        following = self._window.following()
        if following is not None:
            num_steps = self._window.num_known(following, self._window.lookahead + 1)
            following.places = arrived
            following.plan = self._planner.plan(following.feed, num_steps)

    def _carry(self, purpose: str, transfers: Sequence[Transfer]) -> None:
        """Send and receive the rows of all lanes; on the communication thread."""
        lanes = zip(self._carriers, transfers, strict=True)
        with span(f"carry {purpose}"):
            together(
                self._wire, [carrier.carry({purpose: transfer}) for carrier, transfer in lanes]
            )

    def report(self) -> Report:
        """See :class:`Exchange`."""
        return replace(self._done, bytes_by_purpose=dict(self._carriers[0].purposes.sent))

    @property
    def num_cached(self) -> int:
        """Slots in use now; looks at all of them."""
        return sum(carrier.num_cached for carrier in self._carriers)

    def _count_planned(self, plans: Sequence[StepPlan]) -> None:
        for plan in plans:
            for step, transfer in zip(
                self._window.upcoming(), (plan.next_step, plan.prefetch), strict=False
            ):
                step.num_fetched += arrivals(transfer)
        self._done.num_steps += 1
        self._done.lookahead = min(plan.lookahead for plan in plans)
        self._done.lookahead_sum += self._done.lookahead

    def flush(self) -> None:
        """See :class:`Exchange`; every rank calls it.

        Rows stay in the caches, and are at their homes as well.
        """
        self._write_home()
        self.finish_updates()

    def finish_updates(self) -> None:
        """See :class:`Exchange`."""
        for carrier in self._carriers:
            self._communication.submit(carrier.flush)
        self._communication.flush()

    def bring_home(self) -> None:
        """See :class:`Exchange`."""
        self._communication.submit(
            lambda: together(self._wire, [each.bring_home() for each in self._carriers])
        )
        self.finish_updates()

    def forget(self) -> None:
        """See :class:`Exchange`; the rest of a feed that is under way is trained without a plan."""
        self._leave_plan()
        self._unplanned.forget()

    def move_to(self, plan: Plan, rows_per_step: int) -> None:
        """See :class:`Exchange`; batches are looked up as they come until all rows have moved."""
        if self._planned_now is None:
            raise ConfigError(
                "rows on embedding servers, or planned by a central oracle, that are to move",
                "ranks that hold and plan them",
                "leave `servers` and `oracle` out, or train by alltoall or retrieve",
            )
        self._unplanned.move_to(plan, rows_per_step)
        self._leave_plan()

    @property
    def is_moving(self) -> bool:
        """See :class:`Exchange`."""
        return self._unplanned.is_moving

    def _plan_over_new_homes(self) -> None:
        """All rows have moved; the feed under way begins again with its next batch."""
        assert self._planned_now is not None, "rows move"
        self._use(self._planned_now())
        self._window.forget_numbers()
        self._has_moved = True

    def _write_home(self) -> None:
        """Write records to their homes, behind all that was submitted before."""
        if self._window.must_write_home():
            self._communication.submit(
                lambda: together(self._wire, [each.write_home() for each in self._carriers])
            )

    def _leave_plan(self) -> None:
        """Leave the plan: until the next feed batches are looked up as they come."""
        self._begin_fresh(self._window.in_flight)
        self._write_home()
        self._announce_read()
        if self._window.leave():
            for carrier in self._carriers:
                self._communication.submit(carrier.clear)

    def _begin_fresh(self, step: Step | None) -> None:
        """Begin rows anew that do so with a step, wherever they lie: its update is not planned."""
        if step is None or step.batch.fresh is None:
            return
        lanes = step.announced.result().here.lanes
        self._communication.submit(
            lambda: together(
                self._wire,
                [
                    carrier.begin(here.fresh)
                    for carrier, here in zip(self._carriers, lanes, strict=True)
                ],
            )
        )

    def _announce_read(self) -> None:
        """Announce the batches that were read, and give the oracle those that are to be planned.

        The planner thread prepares a batch, the communication thread waits for that and announces
        it. When the announcement is there, that thread gives the step to the planner.
        """
        for step in self._window.take_read():
            prepared = self._planner_thread.submit(partial(prepare, self._lanes, step.batch))
            announced = self._communication.submit(partial(self._announce, prepared, step.is_real))
            announced.add_done_callback(partial(pass_on, step.announced))
            # a filler waits for its announcement: a feed ends where all ranks have only fillers
            is_part = self._window.feed == step.feed and (
                step.is_real or announced.result().is_real
            )
            if is_part and self._window.admit(step):
                self._planner.add(step.feed, announced)

    def _announce(self, prepared: Future[Prepared], is_real: bool) -> Announcement:
        here = prepared.result()
        with span("announce"):
            (announcement,) = together(self._wire, [self._announcer.announce(here, is_real)])
        return announcement

    def _open(self, step: Step) -> None:
        """Fetch rows of the first planned step and of its successor, all records being at home."""
        num_steps = self._window.num_known(step, self._window.lookahead)
        opening = self._planner.open(step.feed, num_steps)
        step.plan = self._planner.plan(step.feed, num_steps)
        following = self._window.following()

        def fetch() -> list[Ints]:
            opened = opening.result()
            step.num_fetched += sum(arrivals(each.now) for each in opened)
            self._carry("prefetch", [each.now for each in opened])
            # of all lanes, or of none
            early = [each.prefetch for each in opened if each.prefetch is not None]
            if following is not None:
                following.num_fetched += sum(map(arrivals, early))
            if early:
                self._carry("prefetch", early)
            return [each.places for each in opened]

        step.places = self._communication.submit(fetch)
