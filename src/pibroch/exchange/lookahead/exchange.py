"""Lookahead training (BagPipe, SOSP'23): rows wait where they are needed next, and little is waited for.

What travels and when is decided in :mod:`pibroch.lookahead`, carried out by :mod:`pibroch.exchange.lookahead.carrier`; the
order of things is kept by :mod:`pibroch.exchange.lookahead.window`. Here each of its events becomes a task. Two threads work
beside the one that trains: the communication thread, which talks to the other ranks, and the planner thread, which keeps the
oracle. What is not planned takes the way of an all-to-all exchange over the same rows, after all records were written home.
``docs/design/0005-lookahead.md`` explains.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pibroch.collectives.task_thread import TaskThread
from pibroch.data import JaggedBatch
from pibroch.embedding import Shard
from pibroch.exchange.agreement import and_then_fillers
from pibroch.exchange.alltoall.exchange import AllToAllExchange, Routes
from pibroch.exchange.alltoall.row_lane import RowLane
from pibroch.exchange.base import Exchange, Report
from pibroch.exchange.lookahead.announcement import Announcement, Announcer, Prepared, prepare
from pibroch.exchange.lookahead.carrier import Carrier, arrivals
from pibroch.exchange.lookahead.planners import Planner
from pibroch.exchange.lookahead.step import Rates, Step
from pibroch.exchange.lookahead.window import FeedWindow
from pibroch.exchange.rows import pool
from pibroch.kernels import parallel
from pibroch.kernels.arrays import Ints, Records
from pibroch.kernels.pack import numba as packing
from pibroch.kernels.route import numba as routing
from pibroch.lookahead import StepPlan
from pibroch.lookahead.oracle_thread import pass_on
from pibroch.observability.trace import span

AHEAD_BYTES = 2 << 30
"""Of the batches that a rank has read ahead, where each is as large as the largest so far on any rank."""
_HEARD_AFTER = 2  # steps


class LookaheadExchange(Exchange[Step | Routes]):
    """Records move to the ranks that need them next; updates cross before the next step only where another rank waits.

    Args:
        unplanned: over the same rows, for what is not planned.
        shards: in this rank's care.
        lane: of all rows.
        carrier: of their records.
        planner: the way to the oracle.
        announcer: the way to the other ranks for batches that were read.
        planner_thread: the planner's; other tasks may run between.
        lookahead: batches that are read ahead.
    """

    def __init__(
        self, unplanned: AllToAllExchange, shards: Sequence[Shard], lane: RowLane, carrier: Carrier, planner: Planner,
        announcer: Announcer, planner_thread: TaskThread, lookahead: int,
    ) -> None:  # fmt: skip
        self._unplanned, self.shards, self._lane, self._wire = unplanned, shards, lane, lane.wire
        self.reads_ahead = unplanned.reads_ahead
        self._carrier, self._planner, self._announcer = carrier, planner, announcer
        self._ranks, self._planner_thread = lane.channel.ranks, planner_thread
        self._communication = self._ranks.communication
        self._window: FeedWindow[Step] = FeedWindow(lookahead)
        self._done = Report(lookahead=lookahead)

    def feed(self, batches: Iterable[JaggedBatch], trains: bool) -> Iterator[JaggedBatch]:
        """See :class:`Exchange`; reads ``lookahead`` batches further than it hands out, and tells their rows to all ranks.

        Large ones are read less far: all ranks hold what takes ``AHEAD_BYTES`` on the rank with the largest, and a few more.
        """
        if not trains:
            yield from self._unplanned.feed(batches, trains)
            return
        self._leave_plan()
        feed, lookahead = self._window.begin_feed(), self._window.lookahead
        ahead: deque[JaggedBatch] = deque()
        announcing: deque[Step] = deque()
        for batch, is_real in and_then_fillers(batches, self._unplanned.row_space.features):
            step = Step(batch, is_real, feed)
            self._window.read(step)
            if len(ahead) <= lookahead + 1 or self._window.feed != feed:
                self._announce_read()
            ahead.append(batch)
            announcing.append(step)
            if len(announcing) > _HEARD_AFTER:  # as all ranks know it by then, without waiting
                largest = announcing.popleft().announced.result().num_bytes
                lookahead = min(lookahead, max(1, AHEAD_BYTES // max(1, largest)))
            while len(ahead) > lookahead + 2:  # a step's plan is made one step early, and waits for no message
                yield ahead.popleft()
                self._announce_read()  # at the same place on all ranks, whose batches may end at different steps
            if not is_real and not step.announced.result().is_real:
                ahead.pop()
                break
        while ahead:
            yield ahead.popleft()

    def lookup(self, batch: JaggedBatch, trains: bool, averaged_at: int | None = None) -> tuple[Tensor, Step | Routes]:
        """See :class:`Exchange`."""
        step = self._window.take(batch) if trains else None
        if step is not None:
            return self._lookup_planned(step), step
        if trains:
            self._leave_plan()
        self._write_home()
        return self._unplanned.lookup(batch, trains, averaged_at)

    def _lookup_planned(self, step: Step) -> Tensor:
        announced = step.announced.result()
        if self._window.open():
            self._open(step)
        if announced.problem is not None:
            self._finish(step, np.empty((0, self._lane.layout.width), np.float32), Rates())
            self.fetch_next()
            raise announced.problem
        with self._ranks.waiting(), span("wait for rows"):
            places = step.places.result()
        self._done.rows_read += len(places)
        self._done.rows_fetched += step.num_fetched
        here = announced.here
        with span("pool"):
            pooled_BFD = pool(here.ids, *self._readable(places, here.row_of_position), self._lane.layout.width)
        self._window.fly(step)
        return self._unplanned.assemble(step.batch.batch_size, [pooled_BFD])

    def _readable(self, places: Ints, row_of_position: NDArray[np.int32]) -> tuple[Records, NDArray[np.signedinteger]]:
        """Records, and which one each position of the batch reads; rounded to the wire's type wherever they are."""
        space, dim = self._lane.shard.space, self._lane.layout.width
        if self._wire.is_exact:
            return space, places[row_of_position]
        rows = np.empty((len(places), dim), np.float32)
        packing.copy_out(space, places, dim, rows.reshape(-1), 0, 0, len(places))
        return self._wire.rounded(rows), row_of_position

    def update(self, handle: Step | Routes, gradient_BFD: Tensor, learning_rate: float, step: int) -> None:
        """See :class:`Exchange`; returns when this rank's gradients are summed, the rest goes on beside the caller."""
        if not isinstance(handle, Step):
            self._leave_plan()
            self._unplanned.update(handle, gradient_BFD, learning_rate, step)
        elif not self._window.update(handle):  # the plan was left since
            routes = self._unplanned.route(handle.batch)
            self._unplanned.update(routes, gradient_BFD, learning_rate, step)
        else:
            (gradient_BFD,) = self._unplanned.split(gradient_BFD)
            gradients = gradient_BFD.numpy().reshape(-1, self._lane.layout.width)
            self._finish(handle, gradients, Rates(learning_rate, step))

    def _finish(self, step: Step, gradients: Records, rates: Rates) -> None:
        """Sum a step's gradients and send on their way those for which the next step waits."""
        with span("wait for plan"):
            plan, announced = step.plan.result(), step.announced.result()
        self._count_planned(plan)
        grouped = announced.here.grouped
        num_sums, num_received = (
            len(grouped.rows),
            sum(int(part.counts[1].sum()) for part in (plan.critical, plan.deferred)),
        )
        step.gradients, step.rates = np.empty((num_sums + num_received, self._lane.layout.width), np.float32), rates
        sums = step.gradients[:num_sums]
        with span("sum gradients"):
            parallel.run(routing.sum_gradients, num_sums, grouped, gradients, np.float32(announced.share), sums)
            if not self._wire.is_exact:
                sums[:] = self._wire.rounded(sums)
        self._window.finish(step)
        step.local = self._planner_thread.submit(
            partial(self._carrier.apply, plan.local, step.gradients, rates, "lone")
        )
        self._communication.submit(partial(self._synchronise, step, plan, num_sums))

    def _synchronise(self, step: Step, plan: StepPlan, num_sums: int) -> None:
        assert step.gradients is not None, "summed before"
        self._carrier.update(plan.critical, step.gradients, num_sums, step.rates, "critical")
        if plan.is_tight:
            self._settle(step, plan)

    def _settle(self, step: Step, plan: StepPlan) -> None:
        """The deferred updates of a step, then what goes home after it and what the step after next reads."""
        assert step.gradients is not None, "summed before"
        step.local.result()
        first = len(step.gradients) - int(plan.deferred.counts[1].sum())
        self._carrier.update(plan.deferred, step.gradients, first, step.rates, "deferred")
        for transfer in plan.evicted[:-1]:
            self._carrier.carry({"evict": transfer})
        last = {"evict": plan.evicted[-1]}
        self._carrier.carry(last if plan.prefetch is None else last | {"prefetch": plan.prefetch})

    def fetch_next(self) -> None:
        """See :class:`Exchange`: rows for the next step, then what can wait."""
        step = self._window.deliver()
        if step is None:
            self._unplanned.fetch_next()
            return
        plan = step.plan.result()

        def deliver() -> Ints:
            self._carrier.carry({"critical": plan.next_step})
            return plan.places

        arrived = self._communication.submit(deliver)
        if not plan.is_tight:
            self._communication.submit(partial(self._settle, step, plan))
        self._announce_read()  # now, as the training thread is about to wait for sums of dense gradients
        following = self._window.following()
        if following is not None:
            known = self._window.num_known(following, self._window.lookahead + 1)
            following.places, following.plan = arrived, self._planner.plan(following.feed, known)

    def report(self) -> Report:
        """See :class:`Exchange`."""
        return replace(self._done, bytes_by_purpose=dict(self._carrier.purposes.sent))

    @property
    def num_cached(self) -> int:
        """Slots in use now; costs a look at all of them."""
        return self._carrier.num_cached

    def _count_planned(self, plan: StepPlan) -> None:
        for step, transfer in zip(self._window.upcoming(), (plan.next_step, plan.prefetch), strict=False):
            step.num_fetched += arrivals(transfer)
        self._done.num_steps += 1
        self._done.lookahead = plan.lookahead
        self._done.lookahead_sum += plan.lookahead

    def flush(self) -> None:
        """See :class:`Exchange`; every rank calls it. Rows stay in the caches, and are at their homes as well."""
        self._write_home()
        self._communication.submit(self._carrier.flush)
        self._communication.flush()

    def forget(self) -> None:
        """See :class:`Exchange`; the rest of a feed that is under way is trained without a plan."""
        self._leave_plan()
        self._unplanned.forget()

    def _write_home(self) -> None:
        if self._window.must_write_home():
            self._communication.submit(self._carrier.write_home)

    def _leave_plan(self) -> None:
        """From now on, until the next feed, batches are looked up as they come."""
        self._write_home()
        self._announce_read()
        if self._window.leave():
            self._communication.submit(self._carrier.clear)

    def _announce_read(self) -> None:
        """Tell all ranks of the batches that were read, and the oracle if they are to be planned."""
        for step in self._window.take_read():
            prepared = self._planner_thread.submit(partial(prepare, self._lane, step.batch))
            announced = self._communication.submit(partial(self._announce, prepared, step.is_real))
            announced.add_done_callback(partial(pass_on, step.announced))
            goes_on = self._window.feed == step.feed and (step.is_real or announced.result().is_real)
            if goes_on and self._window.admit(step):
                self._planner.add(step.feed, announced)

    def _announce(self, prepared: Future[Prepared], is_real: bool) -> Announcement:
        return self._announcer.announce(prepared.result(), is_real)

    def _open(self, step: Step) -> None:
        """Fetch the rows of the first planned step, all records being at home, and of the one after it."""
        known = self._window.num_known(step, self._window.lookahead)
        opening = self._planner.open(step.feed, known)
        step.plan = self._planner.plan(step.feed, known)
        following = self._window.following()

        def fetch() -> Ints:
            opened = opening.result()
            step.num_fetched += arrivals(opened.now)
            self._carrier.carry({"prefetch": opened.now})
            if following is not None:
                following.num_fetched += arrivals(opened.prefetch)
            if opened.prefetch is not None:
                self._carrier.carry({"prefetch": opened.prefetch})
            return opened.places

        step.places = self._communication.submit(fetch)
