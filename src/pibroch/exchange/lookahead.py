"""Lookahead training (BagPipe, SOSP'23): rows wait where they are needed next, and little is waited for.

What travels and when is decided in :mod:`pibroch.lookahead`, carried out by :mod:`pibroch.exchange.carrier`; here is the
order of things in time. Two threads work beside the one that trains: the communication thread, which talks to the other
ranks, and the planner thread, which keeps the oracle. What is not planned takes the path of :class:`AllToAllExchange`,
after all records were written home. ``docs/design/0005-lookahead.md`` explains.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pibroch.collectives import Channel
from pibroch.collectives.ranks import Traffic
from pibroch.collectives.task_thread import TaskThread
from pibroch.data import JaggedBatch
from pibroch.embedding import RowSpace, SparseOptimizer
from pibroch.exchange.alltoall import AllToAllExchange, and_then_fillers
from pibroch.exchange.announcement import Announcement, Announcer, Prepared, prepare
from pibroch.exchange.base import Report
from pibroch.exchange.cache_size import spare_rows
from pibroch.exchange.carrier import Carrier, Purposes, Records, arrivals
from pibroch.exchange.lane import Lane
from pibroch.exchange.layout import LaneLayout, behind, plan_for
from pibroch.exchange.planning import check_same_options, make_planner
from pibroch.exchange.row_lane import RowLane
from pibroch.exchange.rows import pool
from pibroch.exchange.server_lane import ServerLane
from pibroch.exchange.step import Rates, Step
from pibroch.kernels import parallel
from pibroch.kernels.pack import numba as packing
from pibroch.kernels.route import numba as routing
from pibroch.kernels.window.rules import Ints
from pibroch.lookahead import StepPlan
from pibroch.observability.trace import span
from pibroch.planner import Plan
from pibroch.servers.views import RemoteShard

T = TypeVar("T")
LOOKAHEAD = 200
"""Steps, where no number is given: beyond it the paper (Table 3) and the benchmarks found nothing more to gain."""


class LookaheadExchange(AllToAllExchange):
    """Records move to the ranks that need them next; updates cross before the next step only where another rank waits.

    Args:
        row_space: of all tables.
        optimizer: of all tables.
        seed: of the initial weights.
        placement: of the homes: ``row_wise``, ``table_wise``, such kinds by table, or a :class:`Plan` with these, over the
            ranks, or over the servers.
        lookahead: batches read ahead; ``None`` for as many as the cache holds, at most ``LOOKAHEAD``. Shrinks under pressure.
        cache_rows: rows of other ranks' homes that a rank can keep; ``None`` for what fits into half of the free memory.
        cache: design of the cache: ``lrpp``, ``partitioned`` or ``replicated`` (Sec. 3.3).
        delayed_sync: whether updates that the next step does not need cross later, beside it.
        servers: names of workers of this process's RPC group that hold the homes, see :mod:`pibroch.servers`; without any
            the ranks hold them.
        oracle: name of a worker of this process's RPC group that plans for all ranks, see :mod:`pibroch.servers`; without,
            each rank plans for itself.
        wire: type in which gradients, and weights that are read for one step, travel between ranks: ``float32`` (exact),
            ``bfloat16`` or ``float16``. Records that move for good stay float32.
        compress: whether all of it travels compressed, without loss, see :mod:`pibroch.exchange.compression`.
        channel: between the ranks, for this exchange alone; over all ranks of torch.distributed's group when absent.

    Raises:
        ConfigError: for a placement whose rows are cut or copied, or an option that cannot be.
    """

    def __init__(
        self,
        row_space: RowSpace,
        optimizer: SparseOptimizer,
        seed: int,
        *,
        placement: str | Mapping[str, str] | Plan = "row_wise",
        lookahead: int | None = None,
        cache_rows: int | None = None,
        cache: str = "lrpp",
        delayed_sync: bool = True,
        servers: Sequence[str] = (),
        oracle: str | None = None,
        wire: str = "float32",
        compress: bool = False,
        channel: Channel | None = None,
    ) -> None:
        self._cache_rows, self._servers = cache_rows, tuple(servers)
        self._lookahead = LOOKAHEAD if lookahead is None else lookahead
        self._options = {"lookahead": lookahead, "cache": cache, "delayed_sync": delayed_sync, "oracle": oracle}
        super().__init__(row_space, optimizer, seed, placement=placement, wire=wire, compress=compress, channel=channel)
        (lane,) = self._lanes
        assert isinstance(lane, RowLane), "the layout was checked"
        bounds = lane.layout.bounds
        self._lane = lane
        self._homes = lane.homes if isinstance(lane, ServerLane) else None
        self._carrier = Carrier(lane.shard, bounds, optimizer, self._wire, self._homes)
        capacity = len(lane.shard.space) - len(lane.shard.records)
        self._planner_thread = TaskThread("pibroch-planner")
        count = partial(_count, self._communication, self._carrier.purposes, self._ranks.traffic)
        self._planner = make_planner(
            self._planner_thread, oracle, self._channel, bounds, self._lookahead, capacity, cache, delayed_sync, count
        )  # fmt: skip
        self._announcer = Announcer(lane, self._planner.tells_rows)
        if self._homes is not None:
            held = list(enumerate(lane.layout.pieces[lane.world_size :]))[lane.rank :: lane.world_size]
            self.shards = [RemoteShard(self._homes, server, pieces, optimizer) for server, pieces in held]
        self._read: list[Step] = []  # read, not announced
        self._window: deque[Step] = deque()  # announced, not looked up
        self._in_flight: Step | None = None  # looked up, not updated
        self._delivering: Step | None = None  # updated, the rest of its plan not yet under way
        self._rates = Rates()
        self._is_open = False  # whether rows are where the oracle thinks
        self._num_feeds = self._num_announced = 0
        self._feed: int | None = None  # whose steps are planned
        self._is_dirty = False  # whether homes lack updates
        self._done = Report(lookahead=self._lookahead)

    def feed(self, batches: Iterable[JaggedBatch], trains: bool) -> Iterator[JaggedBatch]:
        """See :class:`Exchange`; reads ``lookahead`` batches further than it hands out, and tells their rows to all ranks."""
        if not trains:
            yield from super().feed(batches, trains)
            return
        self._leave_plan()
        self._num_feeds += 1
        feed = self._feed = self._num_feeds
        ahead: deque[JaggedBatch] = deque()
        for batch, is_real in and_then_fillers(batches, self.row_space.features):
            step = Step(batch, is_real, feed)
            self._read.append(step)
            if len(ahead) <= self._lookahead + 1 or self._feed != feed:
                self._announce_read()
            ahead.append(batch)
            if len(ahead) > self._lookahead + 2:  # a step's plan is made one step early, and waits for no message
                yield ahead.popleft()
                self._announce_read()  # at the same place on all ranks, whose batches may end at different steps
            if not is_real and not step.said.result().is_real:
                ahead.pop()
                break
        while ahead:
            yield ahead.popleft()

    def lookup(self, batch: JaggedBatch, trains: bool, averaged_at: int | None = None) -> tuple[Tensor, Any]:
        """See :class:`Exchange`."""
        if trains and self._in_flight is None and self._window and self._window[0].batch is batch:
            return self._lookup_planned(self._window.popleft())
        if trains:
            self._leave_plan()
        self._write_home()
        return super().lookup(batch, trains, averaged_at)

    def _lookup_planned(self, step: Step) -> tuple[Tensor, Step]:
        said = step.said.result()
        if not self._is_open:
            self._open(step)
        if said.problem is not None:
            self._finish(step, np.empty((0, self._lane.layout.width), np.float32), Rates())
            self.fetch_next()
            raise said.problem
        assert step.places is not None, "given by the step before"
        with self._ranks.waiting(), span("wait for rows"):
            places = step.places.result()
        self._done.rows_read += len(places)
        self._done.rows_fetched += step.num_fetched
        here = said.here
        with span("pool"):
            pooled_BFD = pool(here.ids, *self._readable(places, here.row_of_position), self._lane.layout.width)
        self._in_flight = step
        return self._assemble(step.batch.batch_size, [pooled_BFD]), step

    def _readable(self, places: Ints, row_of_position: NDArray[Any]) -> tuple[Records, NDArray[Any]]:
        """Records, and which one each position of the batch reads; rounded to the wire's type wherever they are."""
        space, dim = self._lane.shard.space, self._lane.layout.width
        if self._wire.is_exact:
            return space, places[row_of_position]
        rows = np.empty((len(places), dim), np.float32)
        packing.copy_out(space, places, dim, rows.reshape(-1), 0, 0, len(places))
        return self._wire.rounded(rows), row_of_position

    def update(self, looked_up: Any, gradient_BFD: Tensor, learning_rate: float, step: int) -> None:
        """See :class:`Exchange`; returns when this rank's gradients are summed, the rest goes on beside the caller."""
        if not isinstance(looked_up, Step):
            self._leave_plan()
            super().update(looked_up, gradient_BFD, learning_rate, step)
        elif looked_up is not self._in_flight:  # the plan was left since
            routes = self._announce(looked_up.batch, True).routes.result()
            super().update(routes, gradient_BFD, learning_rate, step)
        else:
            self._in_flight, rates = None, Rates(learning_rate, step)
            (gradient_BFD,) = self._split(gradient_BFD)
            self._finish(looked_up, gradient_BFD.numpy().reshape(-1, self._lane.layout.width), rates)

    def _finish(self, step: Step, gradients: Records, rates: Rates) -> None:
        """Sum a step's gradients and send on their way those for which the next step waits."""
        assert step.plan is not None, "planned when it was looked up"
        with span("wait for plan"):
            plan, said, dim = step.plan.result(), step.said.result(), self._lane.layout.width
        self._count_planned(plan)
        grouped = said.here.grouped
        num_sums, num_critical, num_deferred = (
            len(grouped.rows), int(plan.critical.counts[1].sum()), int(plan.deferred.counts[1].sum()),
        )  # fmt: skip
        step.gradients = np.empty((num_sums + num_critical + num_deferred, dim), np.float32)
        sums = step.gradients[:num_sums]
        with span("sum gradients"):
            parallel.run(routing.sum_gradients, num_sums, grouped, gradients, np.float32(said.share), sums)
            if not self._wire.is_exact:
                sums[:] = self._wire.rounded(sums)
        self._is_dirty, self._delivering, self._rates = True, step, rates
        rest = (step.gradients, rates.learning_rate, rates.number, "lone")
        step.lone = self._planner_thread.submit(lambda: self._carrier.apply(plan.alone, *rest))
        self._communication.submit(lambda: self._synchronise(step, rates))

    def _synchronise(self, step: Step, rates: Rates) -> None:
        plan, carrier = step.plan.result(), self._carrier  # type: ignore[union-attr]
        assert step.gradients is not None
        num_sums = len(step.said.result().here.grouped.rows)
        carrier.update(plan.critical, step.gradients, num_sums, rates.learning_rate, rates.number, "critical")
        if plan.is_tight:
            self._settle(step, rates)

    def _settle(self, step: Step, rates: Rates) -> None:
        """The deferred updates of a step, then what goes home after it and what the step after next reads."""
        plan, carrier = step.plan.result(), self._carrier  # type: ignore[union-attr]
        assert step.gradients is not None
        assert step.lone is not None
        step.lone.result()
        first = len(step.gradients) - int(plan.deferred.counts[1].sum())
        carrier.update(plan.deferred, step.gradients, first, rates.learning_rate, rates.number, "deferred")
        for travel in plan.leaving[:-1]:
            carrier.carry({"evict": travel})
        carrier.carry({"evict": plan.leaving[-1]} | ({} if plan.early is None else {"prefetch": plan.early}))

    def fetch_next(self) -> None:
        """See :class:`Exchange`: rows for the next step, then what can wait."""
        step, rates = self._delivering, self._rates
        if step is None:
            super().fetch_next()
            return
        self._delivering = None
        assert step.plan is not None
        plan = step.plan

        def deliver() -> Ints:
            self._carrier.carry({"critical": plan.result().soon})
            return plan.result().places

        def settle() -> None:
            if not plan.result().is_tight:
                self._settle(step, rates)

        arrived = self._communication.submit(deliver)
        self._communication.submit(settle)
        self._announce_read()  # now, as the training thread is about to wait for sums of dense gradients
        if self._window:
            following = self._window[0]
            following.places = arrived
            following.plan = self._planner.plan(following.feed, self._farthest(following, self._lookahead + 1))

    def report(self) -> Report:
        """See :class:`Exchange`."""
        return replace(self._done, bytes_by_purpose=dict(self._carrier.purposes.sent))

    def _count_planned(self, plan: StepPlan) -> None:
        for step, travel in zip(self._window, (plan.soon, plan.early), strict=False):
            step.num_fetched += arrivals(travel)
        self._done.num_steps += 1
        self._done.lookahead = plan.lookahead
        self._done.lookahead_sum += plan.lookahead

    def flush(self) -> None:
        """See :class:`Exchange`; every rank calls it. Rows stay in the caches, and are at their homes as well."""
        self._write_home()
        if self._homes is not None:
            self._communication.submit(self._homes.flush)
        self._communication.flush()

    def forget(self) -> None:
        """See :class:`Exchange`; the rest of a feed that is under way is trained without a plan."""
        self._leave_plan()
        super().forget()

    def _write_home(self) -> None:
        if self._is_dirty:
            self._is_dirty = False
            self._communication.submit(self._carrier.write_home)

    def _leave_plan(self) -> None:
        """From now on, until the next feed, batches are looked up as they come."""
        self._write_home()
        self._announce_read()
        self._window.clear()
        self._feed = self._in_flight = None
        if self._is_open:
            self._is_open = False
            self._communication.submit(self._carrier.clear)

    def _announce_read(self) -> None:
        """Tell all ranks of the batches that were read, and the oracle if they are to be planned."""
        for step in self._read:
            prepared = self._planner_thread.submit(partial(prepare, self._lane, step.batch))
            said = self._communication.submit(partial(self._announce_prepared, prepared, step.is_real))
            said.add_done_callback(partial(_pass_on, step.said))
            if self._feed == step.feed and (step.is_real or said.result().is_real):
                self._num_announced += 1
                step.number = self._num_announced
                self._window.append(step)
                self._planner.add(step.feed, said)
        self._read.clear()

    def _announce_prepared(self, prepared: Future[Prepared], is_real: bool) -> Announcement:
        before = self._announcer.sent
        try:
            return self._announcer.announce(prepared.result(), is_real)
        finally:
            self._carrier.purposes.add("ids", self._announcer.sent - before)

    def _farthest(self, step: Step, num_steps: int) -> int:
        """How many steps the oracle knows when it knows the first ``num_steps`` of the window, or all of it, and ``step``."""
        return self._window[min(num_steps, len(self._window)) - 1].number if self._window else step.number

    def _open(self, step: Step) -> None:
        self._is_open = True
        farthest = self._farthest(step, self._lookahead)
        opening = self._planner.open(step.feed, farthest)
        step.plan = self._planner.plan(step.feed, farthest)
        following = self._window[0] if self._window else None

        def fetch() -> Ints:
            opened = opening.result()
            step.num_fetched += arrivals(opened.now)
            if following is not None:
                following.num_fetched += arrivals(opened.early)
            self._carrier.carry({"prefetch": opened.now})
            if opened.early is not None:
                self._carrier.carry({"prefetch": opened.early})
            return opened.places

        step.places = self._communication.submit(fetch)

    def _plan(self, placement: str | Mapping[str, str] | Plan) -> Plan:
        if not self._servers:
            return super()._plan(placement)
        plan = plan_for(self.row_space, placement, len(self._servers), "servers")
        return behind(plan, self._ranks.world_size)

    def _lane_of(self, layout: LaneLayout, optimizer: SparseOptimizer, seed: int) -> Lane:
        check_same_options(self._channel, self._options)
        spare = spare_rows(layout, optimizer, self._cache_rows, self._channel)
        if self._servers:
            return ServerLane(layout, optimizer, seed, self._channel, self._wire, spare, self._servers)
        return RowLane(layout, optimizer, seed, self._channel, self._wire, spare)


def _count(thread: TaskThread, purposes: Purposes, traffic: Traffic, purpose: str, num_bytes: int) -> None:
    """Count what travels to and from the oracle, which keeps no account; on the thread that counts all else."""

    def count() -> None:
        purposes.add(purpose, num_bytes)
        traffic.sent += num_bytes
        traffic.received += num_bytes

    thread.submit(count)


def _pass_on(answer: Future[T], source: Future[T]) -> None:
    error = source.exception()
    if error is None:
        answer.set_result(source.result())
    else:
        answer.set_exception(error)
