"""Lookahead training (BagPipe, SOSP'23).

Rows lie where they are needed next, so little is waited for.

What travels and when is decided in :mod:`pibroch.exchange.lookahead.oracle`, carried out by
:mod:`pibroch.exchange.lookahead.carrier`; :mod:`pibroch.exchange.lookahead.window` knows which
batch is where, and :data:`SCHEDULE` which thread does what for it and when. Methods run on the
training thread. Batches that are not planned are looked up as in an all-to-all exchange over the
same rows, after all records were written home. Why: ``docs/design/0005-lookahead.md``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np
from torch import Tensor

from pibroch.collectives.task_thread import TaskThread
from pibroch.data import JaggedBatch
from pibroch.embedding import Shard
from pibroch.errors import ConfigError
from pibroch.exchange.agreement import and_then_fillers
from pibroch.exchange.alltoall.exchange import AllToAllExchange
from pibroch.exchange.alltoall.row_lane import RowLane
from pibroch.exchange.base import CachesRows, Exchange, MovesRows, Rates, Report
from pibroch.exchange.fresh_rows import FreshRecords
from pibroch.exchange.lookahead.announcement import Announcement, Announcer, Prepared, prepare
from pibroch.exchange.lookahead.carrier import Carrier, arrivals
from pibroch.exchange.lookahead.oracle import StepPlan
from pibroch.exchange.lookahead.oracle.kernels.window import Transfer
from pibroch.exchange.lookahead.planners import Planner
from pibroch.exchange.lookahead.window import AHEAD_AT_FIRST, FeedWindow, Reach
from pibroch.exchange.messages import Joined, alone, carried, joined, together
from pibroch.exchange.prefetching import FedStep
from pibroch.exchange.rows import pool
from pibroch.exchange.schedule import (
    FAR_AHEAD,
    Moment,
    Queue,
    Run,
    Runner,
    Schedule,
    ScheduledStep,
    Task,
    Thread,
)
from pibroch.kernels.arrays import Ints, Records
from pibroch.kernels.scatter_update import Hyper
from pibroch.observability.trace import span
from pibroch.planner import Plan

T = TypeVar("T")
_Lane = tuple[Carrier, StepPlan, Records, Hyper | None, FreshRecords | None]
_ANNOUNCED_AFTER = 2
"""Steps after which a batch's announcement is there without waiting."""
SCHEDULE = Schedule(
    Task("prepare", Queue.PLANNER, Moment.READ),
    Task("announce", Queue.NETWORK, Moment.READ, after=("prepare",)),
    # of the step that is as far ahead as the plan looks
    Task("plan", Queue.ORACLE, Moment.TURN, after=(("announce", FAR_AHEAD),)),
    Task("pool", Queue.CALLER, Moment.LOOKUP, after=(("deliver", -1),)),
    Task("combine", Queue.CALLER, Moment.GRADIENTS, after=("plan",)),
    # Both threads update rows now, and never the same: "local" ones concern this rank alone.
    # Settling waits for them, since rows that go home afterwards may be among them.
    Task("local", Queue.PLANNER, Moment.GRADIENTS, after=("combine",)),
    Task("critical", Queue.NETWORK, Moment.GRADIENTS, after=("combine",)),
    # Lanes short of slots settle before the next step's rows take some, the others behind them.
    Task("settle tight", Queue.NETWORK, Moment.GRADIENTS, after=("local",), only_if="is_tight"),
    Task("deliver", Queue.NETWORK, Moment.END),
    Task("settle", Queue.NETWORK, Moment.END, after=("local",), only_if="has_room"),
)


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
class Step(ScheduledStep):
    """One batch, from its reading to the end of its updates.

    The training thread makes it and passes it to tasks of the other threads. What a task returns is
    read by way of its future; ``gradients`` belong to "local" and "critical" until both are done.

    Attributes:
        batch: this rank's part.
        is_real: unless it is a filler after this rank's last batch.
        feed: number of its feed.
        number: among the steps that the oracle gets, from 1.
        lanes: by which it is announced.
        num_fetched: how many of its rows other ranks have sent, or will send, for it.
        gradient_rows: of this rank, for each lane, until they are summed.
        gradients: their sums and room for those of other ranks, for each lane.
        rates: of its update; ``None`` where nothing is updated.
        hyper: the same for each lane.
        fresh: rows that begin anew with it, for each lane.
    """

    batch: JaggedBatch
    is_real: bool
    feed: int
    number: int = 0
    lanes: Sequence[RowLane] = ()
    num_fetched: int = 0
    gradient_rows: Sequence[Records] = ()
    gradients: list[Records] = field(default_factory=list)
    rates: Rates | None = None
    hyper: Sequence[Hyper | None] = field(default_factory=list)
    fresh: Sequence[FreshRecords | None] = field(default_factory=list)

    @property
    def announced(self) -> Announcement:
        """What all ranks say about it; waits."""
        announcement: Announcement = self.tasks["announce"].result()
        return announcement

    @property
    def plans(self) -> list[StepPlan]:
        """What happens after it, for each lane; waits."""
        plans: list[StepPlan] = self.tasks["plan"].result()
        return plans

    @property
    def update(self) -> int:
        """The number of its update, from 1; 0 where nothing is updated."""
        return 0 if self.rates is None else self.rates.step

    @property
    def is_tight(self) -> bool:
        """Whether some lane is short of slots."""
        return any(plan.is_tight for plan in self.plans)

    @property
    def has_room(self) -> bool:
        """Whether some lane is not."""
        return not all(plan.is_tight for plan in self.plans)


class LookaheadExchange(Exchange[Step | FedStep], MovesRows, CachesRows):
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

    Attributes:
        reads_at_first: batches that a feed reads before its first step, see :class:`Reach`.
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
        self.wire = unplanned.wire
        self.announcer = announcer
        self.reads_ahead = unplanned.reads_ahead
        self.reads_at_first = AHEAD_AT_FIRST
        self._planned_now = planned_now
        self._has_moved = False
        self._last_feed = 0
        self._use(planned)
        self._ranks = self.wire.channel.ranks
        self._communication = self._ranks.communication
        threads: dict[Queue, Thread] = {
            Queue.PLANNER: planner_thread,
            Queue.NETWORK: self._communication,
            Queue.ORACLE: _Asked(),
        }
        self._runner: Runner[LookaheadExchange, Step] = Runner(SCHEDULE, threads, RUNS)
        self._window: FeedWindow[Step] = FeedWindow(lookahead)
        self._done = Report(lookahead=lookahead)

    @property
    def schedule(self) -> Schedule:
        """See :class:`Exchange`."""
        return SCHEDULE

    @property
    def lookahead(self) -> int:
        """Batches that are read ahead at most."""
        return self._window.lookahead

    def _use(self, planned: PlannedLanes) -> None:
        """Plan over these from now on."""
        self._lanes = planned.lanes
        self.shards = planned.shards
        self.planner = planned.planner
        self.caches = self.carriers = planned.carriers

    def feed(self, batches: Iterable[JaggedBatch], trains: bool) -> Iterator[JaggedBatch]:
        """See :class:`Exchange`; reads ``lookahead`` batches ahead and announces them to all ranks.

        It begins with a few, and reads large ones less far, see :class:`Reach`.
        """
        if not trains:
            yield from self._unplanned.feed(batches, trains)
            return
        self._leave_plan()
        feed = self._begin_feed()
        reach = Reach(self._window.lookahead, self.reads_at_first)
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
                reach.batch_takes(announcing.popleft().announced.num_bytes)
            # two more than planned: a plan is made one step early, and is to wait for no message
            while len(ahead) > reach.steps + 2:
                yield ahead.popleft().batch
                reach.step_begins()
                feed = self._begin_again(feed, ahead)
                # at the same place on all ranks, whose batches may end at different steps
                self._announce_read()
            if not is_real and not step.announced.is_real:
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
    ) -> tuple[list[Tensor], Step | FedStep]:
        """See :class:`Exchange`."""
        step = self._window.take(batch) if trains else None
        if step is not None:
            return self._lookup_planned(step), step
        leave = self._leave_plan if trains else self._write_home
        leave()
        return self._unplanned.lookup(batch, trains, averaged_at)

    def _lookup_planned(self, step: Step) -> list[Tensor]:
        problem = step.announced.problem
        if self._window.open():
            self._open(step)
        if problem is not None:
            nothing = [np.empty((0, lane.layout.width), np.float32) for lane in self._lanes]
            self._finish(step, nothing, Rates([0.0] * len(self._lanes), 0))
            self.fetch_next()
            raise problem
        with self._ranks.waiting(), span("wait for rows"):
            places: list[Ints] = step.tasks["deliver", -1].result()
        self._done.rows_read += sum(map(len, places))
        self._done.rows_fetched += step.num_fetched
        self._runner.at(Moment.LOOKUP, self, step)
        self._window.fly(step)
        return self._unplanned.assemble(step.batch, step.tasks.pop("pool").result())

    def update(self, handle: Step | FedStep, gradients: Sequence[Tensor], rates: Rates) -> None:
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

    def drop(self, handle: Step | FedStep, gradients: Sequence[Tensor]) -> None:
        """See :class:`Exchange`; what was planned goes on, but for the updates."""
        if not isinstance(handle, Step):
            self._unplanned.drop(handle, gradients)
        elif self._window.update(handle):
            self._finish(handle, self._gradient_rows(handle, gradients), None)

    def _gradient_rows(self, step: Step, gradients: Sequence[Tensor]) -> list[Records]:
        """For each lane."""
        lanes = step.announced.here.lanes
        parts = self._unplanned.split(step.batch, gradients)
        return [lane.ids.gradient_rows(part) for lane, part in zip(lanes, parts, strict=True)]

    def _finish(self, step: Step, gradients: Sequence[Records], rates: Rates | None) -> None:
        """Sum a step's gradients, and submit what is done with the sums.

        Without ``rates`` nothing is updated.
        """
        step.gradient_rows = gradients
        step.rates = rates
        with span("wait for plan"):
            plans = step.plans
        self._count_planned(plans)
        self._runner.at(Moment.GRADIENTS, self, step)
        self._window.finish(step)

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
        self._runner.at(Moment.END, self, step)
        # Now, as the training thread is about to wait for sums of dense gradients, and the planner
        # thread may have the core.
        self._announce_read()
        following = self._window.following()
        if following is not None:
            self._runner.follow(step, following)
            self._runner.at(Moment.TURN, self, following)

    def carry(self, purpose: str, transfers: Sequence[Transfer]) -> Joined[list[None]]:
        """Send and receive the rows of all lanes."""
        lanes = zip(self.carriers, transfers, strict=True)
        return joined([carrier.carry({purpose: own}) for carrier, own in lanes])

    def report(self) -> Report:
        """See :class:`Exchange`."""
        return replace(self._done, bytes_by_purpose=dict(self.carriers[0].purposes.sent))

    @property
    def num_cached(self) -> int:
        """Slots in use now; looks at all of them."""
        return sum(carrier.num_cached for carrier in self.carriers)

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
        """See :class:`CachesRows`."""
        for carrier in self.carriers:
            self._communication.submit(carrier.flush)
        self._communication.flush()

    def bring_home(self) -> None:
        """See :class:`CachesRows`."""
        self._communication.submit(
            lambda: together(self.wire, [each.bring_home() for each in self.carriers])
        )
        self.finish_updates()

    def forget(self) -> None:
        """See :class:`Exchange`; the rest of a feed that is under way is trained without a plan."""
        self._leave_plan()
        self._unplanned.forget()

    def move_to(self, plan: Plan, rows_per_step: int) -> None:
        """See :class:`MovesRows`; batches are looked up as they come until all rows have moved."""
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
        """See :class:`MovesRows`."""
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
                lambda: together(self.wire, [each.write_home() for each in self.carriers])
            )

    def _leave_plan(self) -> None:
        """Leave the plan: until the next feed batches are looked up as they come."""
        self._begin_fresh(self._window.in_flight)
        self._write_home()
        self._announce_read()
        if self._window.leave():
            for carrier in self.carriers:
                self._communication.submit(carrier.clear)

    def _begin_fresh(self, step: Step | None) -> None:
        """Begin rows anew that do so with a step, wherever they lie: its update is not planned."""
        if step is None or step.batch.fresh is None:
            return
        lanes = step.announced.here.lanes
        self._communication.submit(
            lambda: together(
                self.wire,
                [
                    carrier.begin(here.fresh)
                    for carrier, here in zip(self.carriers, lanes, strict=True)
                ],
            )
        )

    def _announce_read(self) -> None:
        """Announce the batches that were read, and give the oracle those that are to be planned.

        The planner thread prepares a batch, the communication thread waits for that and announces
        it. When the announcement is there, that thread gives the step to the planner.
        """
        for step in self._window.take_read():
            step.lanes = self._lanes
            self._runner.at(Moment.READ, self, step)
            # a filler waits for its announcement: a feed ends where all ranks have only fillers
            is_part = self._window.feed == step.feed and (step.is_real or step.announced.is_real)
            if is_part and self._window.admit(step):
                self.planner.add(step.feed, step.tasks["announce"])

    def num_known(self, step: Step) -> int:
        """How many steps the oracle knows when it plans what follows a step of the window."""
        return self._window.num_known(step, self._window.lookahead + 1)

    def room_for(self, batch: JaggedBatch) -> Tensor | None:
        """Memory for a batch's pooled embeddings."""
        return self._unplanned.room_for(batch)

    def _open(self, step: Step) -> None:
        """Fetch rows of the first planned step and of its successor, all records being at home."""
        num_steps = self._window.num_known(step, self._window.lookahead)
        opening = self.planner.open(step.feed, num_steps)
        step.tasks["plan"] = self.planner.plan(step.feed, num_steps)
        following = self._window.following()

        def fetch() -> list[Ints]:
            opened = opening.result()
            step.num_fetched += sum(arrivals(each.now) for each in opened)
            carried(self.wire, self.carry("prefetch", [each.now for each in opened]))
            # of all lanes, or of none
            early = [each.prefetch for each in opened if each.prefetch is not None]
            if following is not None:
                following.num_fetched += sum(map(arrivals, early))
            if early:
                carried(self.wire, self.carry("prefetch", early))
            return [each.places for each in opened]

        # its rows come by this, and not behind a step before
        step.tasks["deliver", -1] = self._communication.submit(fetch)


class _Asked:
    """The oracle as a queue: what is submitted asks it, and returns the future of its answer."""

    def submit(self, ask: Callable[[], Future[T]]) -> Future[T]:
        return ask()


def _prepare(_: LookaheadExchange, step: Step) -> Prepared:
    return prepare(step.lanes, step.batch)


def _announce(exchange: LookaheadExchange, step: Step, here: Prepared) -> Joined[Announcement]:
    return alone(exchange.announcer.announce(here, step.is_real))


def _plan(exchange: LookaheadExchange, step: Step, _: None) -> Future[list[StepPlan]]:
    return exchange.planner.plan(step.feed, exchange.num_known(step))


def _pool(exchange: LookaheadExchange, step: Step) -> list[Tensor]:
    places: list[Ints] = step.tasks.pop(("deliver", -1)).result()
    lanes = list(zip(exchange.carriers, step.announced.here.lanes, places, strict=True))
    if step.batch.fresh is not None:
        for carrier, here, rows in lanes:
            if here.fresh is not None:
                carrier.show(here.fresh, here.grouped.rows, rows)
    room = exchange.room_for(step.batch)
    return [
        pool(here.ids, *carrier.read(rows, here.row_of_position), carrier.shard.dim, room)
        for carrier, here, rows in lanes
    ]


def _combine(exchange: LookaheadExchange, step: Step) -> None:
    announced = step.announced
    here = announced.here.lanes
    lanes = zip(exchange.carriers, here, step.gradient_rows, step.plans, strict=True)
    step.gradients = [
        carrier.sums(own.grouped, rows, announced.share, plan) for carrier, own, rows, plan in lanes
    ]
    step.gradient_rows = ()
    rates = step.rates
    step.hyper = [None] * len(exchange.carriers)
    if rates is not None:
        step.hyper = [
            carrier.hyper(rate, rates.step)
            for carrier, rate in zip(exchange.carriers, rates.learning_rates, strict=True)
        ]
    step.fresh = [own.fresh for own in here]


def _lanes_of(exchange: LookaheadExchange, step: Step) -> list[_Lane]:
    parts = (exchange.carriers, step.plans, step.gradients, step.hyper, step.fresh)
    return list(zip(*parts, strict=True))


def _update_local(exchange: LookaheadExchange, step: Step, _: None) -> None:
    """Update the rows that this rank alone touched."""
    for carrier, plan, gradients, hyper, fresh in _lanes_of(exchange, step):
        carrier.apply(plan.local, gradients, hyper, step.update, "local", fresh)


def _critical(exchange: LookaheadExchange, step: Step, _: None) -> Joined[list[None]]:
    """Send the gradients of rows that the next step reads, and update those owned here."""
    firsts = [len(own.grouped.rows) for own in step.announced.here.lanes]
    lanes = zip(_lanes_of(exchange, step), firsts, strict=True)
    return joined(
        [
            carrier.update(plan.critical, gradients, first, hyper, step.update, "critical", fresh)
            for (carrier, plan, gradients, hyper, fresh), first in lanes
        ]
    )


def _deliver(exchange: LookaheadExchange, step: Step) -> Joined[list[Ints]]:
    """Send the rows that the next step reads; returns where they are."""
    yield from exchange.carry("critical", [plan.next_step for plan in step.plans])
    return [plan.places for plan in step.plans]


def _settle(is_tight: bool, exchange: LookaheadExchange, step: Step, _: None) -> Joined[list[None]]:
    """The rest of a step's plan: deferred updates, records that go home, rows read later."""
    return joined(
        [
            carrier.settle(plan, gradients, hyper, step.update, fresh)
            for carrier, plan, gradients, hyper, fresh in _lanes_of(exchange, step)
            if plan.is_tight == is_tight
        ]
    )


RUNS: dict[str, Run] = {
    "prepare": _prepare,
    "announce": _announce,
    "plan": _plan,
    "pool": _pool,
    "combine": _combine,
    "local": _update_local,
    "critical": _critical,
    "settle tight": partial(_settle, True),
    "deliver": _deliver,
    "settle": partial(_settle, False),
}
