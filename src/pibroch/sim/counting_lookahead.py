"""What ranks do in steps of ``lookahead``, counted as in :mod:`pibroch.sim.counting`.

Each rank has its own oracle, as in a run, and the order of things is that of
:class:`pibroch.exchange.lookahead.exchange.LookaheadExchange`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.exchange.alltoall.row_lane import RowLane
from pibroch.exchange.layout import lay_out
from pibroch.exchange.lookahead.announcement import (
    Announcement,
    Announcer,
    BytesByPurpose,
    prepare,
)
from pibroch.exchange.lookahead.build import check_whole_rows
from pibroch.exchange.lookahead.carrier import Carrier
from pibroch.exchange.lookahead.oracle import JointOracle, Oracle, StepPlan
from pibroch.exchange.lookahead.oracle.kernels.window import Transfer
from pibroch.exchange.messages import Messages, joined
from pibroch.exchange.rows import pool, room_for
from pibroch.exchange.wire import RowWire
from pibroch.kernels.arrays import Ints, Records
from pibroch.sim.alone import RowRuns
from pibroch.sim.counting import GRADIENT, LEARNING_RATE, Job, StepCount, of_ranks, timed
from pibroch.sim.held import held_bytes
from pibroch.sim.lockstep import Clock, Operation, lockstep, virtual_wire

T = TypeVar("T")
Generators = list[Messages[T]]
READ_BEYOND = 2
"""Batches that are read beyond those that a plan needs, see ``LookaheadExchange.feed``."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """How batches are read ahead.

    Attributes:
        lookahead: steps beyond the current one.
        cache_rows: slots of each group of tables; for all rows when absent.
        design, delayed: see :class:`pibroch.Lookahead`.
    """

    lookahead: int
    cache_rows: int | None = None
    design: str = "lrpp"
    delayed: bool = True


@dataclass(slots=True)
class _Batch:
    """A step that was announced, of each rank."""

    batches: list[JaggedBatch]
    announced: list[Announcement]
    ids: list[int]


def count_lookahead(
    job: Job,
    ahead: Ahead,
    num_steps: int,
    warm_up: int | None = None,
    clock: Clock | None = None,
) -> list[StepCount]:
    """Steps of ``lookahead`` one by one, after some whose slots fill.

    Args:
        job: what is trained.
        ahead: and how.
        num_steps: that are counted.
        warm_up: steps before them; when absent as many as are looked ahead, after which as many
            rows come as go.
        clock: to time the work.
    """
    ranks = _Ranks(job, ahead, clock)
    ranks.open()
    warm_up = ahead.lookahead + 1 if warm_up is None else warm_up
    steps = [ranks.step(number + 1) for number in range(warm_up + num_steps)]
    return steps[warm_up:]


class _Ranks:
    """All ranks, and the steps that they know."""

    def __init__(self, job: Job, ahead: Ahead, clock: Clock | None) -> None:
        self._job = job
        self._ahead = ahead
        self._clock = clock
        self._ranks = range(job.num_ranks)
        wires = [virtual_wire(rank, job.num_ranks, job.wire) for rank in self._ranks]
        self._lanes = [lanes_of(job, ahead, rank, wires[rank]) for rank in self._ranks]
        self._width = float(np.mean([lane.layout.width for lane in self._lanes[0]]))
        purposes = [BytesByPurpose() for _ in self._ranks]
        self._carriers = [
            [Carrier(lane, own) for lane in lanes]
            for lanes, own in zip(self._lanes, purposes, strict=True)
        ]
        self._announcers = [
            Announcer(wire.channel, True, own) for wire, own in zip(wires, purposes, strict=True)
        ]
        self._oracles = [
            JointOracle(
                [
                    Oracle(
                        lane.layout.bounds,
                        rank,
                        ahead.lookahead,
                        len(lane.shard.space) - len(lane.shard.records),
                        ahead.design,
                        ahead.delayed,
                    )
                    for lane in lanes
                ]
            )
            for rank, lanes in enumerate(self._lanes)
        ]
        self._wire = wires[0]
        self._of_rows = RowRuns(job.has_numbers, self._width, clock)
        self._known: deque[_Batch] = deque()
        self._places: list[list[Ints]] = []
        self._num_read = 0

    def open(self) -> None:
        """Read as far ahead as a feed does, and fetch the rows of the first steps."""
        while len(self._known) < self._ahead.lookahead + READ_BEYOND:
            self._read()
        opened = [oracle.open() for oracle in self._oracles]
        self._carry("open", [[each.now for each in own] for own in opened])
        early = [[each.prefetch for each in own if each.prefetch is not None] for own in opened]
        if all(early):
            self._carry("open", early)
        self._places = [[each.places for each in own] for own in opened]

    def step(self, number: int) -> StepCount:
        """Take a step."""
        step = self._known.popleft()
        places = self._places
        plans, planned = self._timed("plan", lambda rank: self._oracles[rank].plan())
        planned.parts[0][:, 0] = [_num_touched(each) for each in step.announced]
        pooled, pools = self._timed("pool", partial(self._pooled, step))
        gradients = [self._of_rows.gradients(own, GRADIENT) for own in pooled]
        sums, combined = self._timed("combine", partial(self._sums, step, gradients, plans))
        _, local = self._timed("local", partial(self._update_local, plans, sums, number))
        for rank in self._ranks:
            rows = sum(map(len, places[rank]))
            about = (
                step.ids[rank],
                rows,
                4 * self._width * rows,
                0,
                4 * self._width * step.ids[rank],
            )
            pools.parts[0][rank] = combined.parts[0][rank] = about
            rows = sum(len(plan.local.places) for plan in plans[rank])
            local.parts[0][rank, 1:3] = rows, 4 * self._width * rows
        firsts = [[len(lane.grouped.rows) for lane in each.here.lanes] for each in step.announced]
        critical = self._run("critical", partial(self._critical, plans, sums, firsts, number))
        is_tight = [[plan.is_tight for plan in own] for own in plans]
        settle = partial(self._settle, plans, sums, number)
        tight = self._run("settle tight", partial(settle, True))
        deliver = self._carry("deliver", [[plan.next_step for plan in own] for own in plans])
        later = self._run("settle", partial(settle, False))
        self._places = [[plan.places for plan in own] for own in plans]
        read = self._read()
        num_slots = [sum(int(plan.used[rank]) for plan in plans[rank]) for rank in self._ranks]
        settled = [later] * (not all(map(all, is_tight)))
        done = [planned, pools, combined, local, critical, deliver, *settled, *read]
        done += [tight] * any(map(any, is_tight))
        held = [self._held(rank, step, pooled[rank], sums[rank]) for rank in self._ranks]
        return StepCount(done, np.array(num_slots), of_ranks(held, done))

    def _held(
        self, rank: int, step: _Batch, pooled: Sequence[Tensor], sums: Sequence[Records]
    ) -> dict[str, int]:
        """Bytes that a rank holds beside rows and slots."""
        known = [step, *self._known]
        spaces = [lane.shard.space for lane in self._lanes[rank]]
        return {
            "batches": held_bytes([each.batches[rank] for each in known]),
            "announcements": held_bytes([each.announced[rank] for each in known]),
            "oracle": held_bytes(self._oracles[rank]),
            "messages": held_bytes(pooled, sums, self._places[rank], but=spaces)
            + held_bytes(pooled),  # and its gradients
        }

    def _read(self) -> list[Operation]:
        """Read, prepare and announce one more batch, and give it to the oracles."""
        number = self._num_read
        self._num_read += 1
        batches, read = self._timed("read", partial(self._job.batch_of, number))
        ids = [batch.values.numel() for batch in batches]
        prepared, grouped = self._timed(
            "prepare", lambda rank: prepare(self._lanes[rank], batches[rank])
        )
        read.parts[0][:, 0] = grouped.parts[0][:, 0] = ids
        announced, told = lockstep(
            "announce",
            self._wire,
            [
                joined([self._announcers[rank].announce(prepared[rank], True)])
                for rank in self._ranks
            ],
            [0] * len(self._ranks),
            self._width,
            self._clock,
        )
        each_announced = [own[0] for own in announced]
        _, added = self._timed(
            "add", lambda rank: self._oracles[rank].add(each_announced[rank].rows)
        )
        added.parts[0][:, 0] = list(map(_num_touched, each_announced))
        self._known.append(_Batch(batches, each_announced, ids))
        return [read, grouped, told, added]

    def _pooled(self, step: _Batch, rank: int) -> list[Tensor]:
        room = room_for(self._job.groups, step.batches[rank])
        here = step.announced[rank].here.lanes
        pooled = []
        for carrier, lane, places in zip(
            self._carriers[rank], here, self._places[rank], strict=True
        ):
            dim = carrier.shard.dim
            if self._job.has_numbers:
                rows, numbers = carrier.read(places, lane.row_of_position)
            else:
                rows = np.asarray(self._of_rows.blank.tensor((len(places), dim)))
                numbers = lane.row_of_position
            pooled.append(pool(lane.ids, rows, numbers, dim, room))
        return self._of_rows.kept(pooled)

    def _sums(
        self,
        step: _Batch,
        gradients: Sequence[Sequence[Tensor]],
        plans: Sequence[Sequence[StepPlan]],
        rank: int,
    ) -> list[Records]:
        announced = step.announced[rank]
        sums = [
            carrier.sums(lane.grouped, lane.ids.gradient_rows(gradient), announced.share, plan)
            for carrier, lane, gradient, plan in zip(
                self._carriers[rank],
                announced.here.lanes,
                gradients[rank],
                plans[rank],
                strict=True,
            )
        ]
        return self._of_rows.kept(sums)

    def _update_local(
        self,
        plans: Sequence[Sequence[StepPlan]],
        sums: Sequence[Sequence[Records]],
        number: int,
        rank: int,
    ) -> None:
        given = self._given(sums, rank)
        for carrier, plan, own in zip(self._carriers[rank], plans[rank], given, strict=True):
            hyper = carrier.hyper(LEARNING_RATE, number)
            carrier.apply(plan.local, own, hyper, number, "local", None)

    def _critical(
        self,
        plans: Sequence[Sequence[StepPlan]],
        sums: Sequence[Sequence[Records]],
        firsts: Sequence[Sequence[int]],
        number: int,
        rank: int,
    ) -> Generators[None]:
        return [
            carrier.update(
                plan.critical,
                own,
                first,
                carrier.hyper(LEARNING_RATE, number),
                number,
                "critical",
                None,
            )
            for carrier, plan, own, first in zip(
                self._carriers[rank],
                plans[rank],
                self._given(sums, rank),
                firsts[rank],
                strict=True,
            )
        ]

    def _settle(
        self,
        plans: Sequence[Sequence[StepPlan]],
        sums: Sequence[Sequence[Records]],
        number: int,
        is_tight: bool,
        rank: int,
    ) -> Generators[None]:
        return [
            carrier.settle(plan, own, carrier.hyper(LEARNING_RATE, number), number, None)
            for carrier, plan, own in zip(
                self._carriers[rank], plans[rank], self._given(sums, rank), strict=True
            )
            if plan.is_tight == is_tight
        ]

    def _timed(self, name: str, work: Callable[[int], T]) -> tuple[list[T], Operation]:
        return timed(name, work, self._ranks, self._clock)

    def _run(self, name: str, generators: Callable[[int], Generators[None]]) -> Operation:
        ids = [0] * len(self._ranks)
        return self._of_rows.run(name, self._wire, lambda rank: joined(generators(rank)), ids)[1]

    def _given(self, sums: Sequence[Sequence[Records]], rank: int) -> list[Records]:
        return [np.asarray(own) for own in self._of_rows.given(list(sums[rank]))]

    def _carry(self, name: str, transfers: Sequence[Sequence[Transfer]]) -> Operation:
        def generators(rank: int) -> Generators[None]:
            pairs = zip(self._carriers[rank], transfers[rank], strict=True)
            return [carrier.carry({name: transfer}) for carrier, transfer in pairs]

        return self._run(name, generators)


def lanes_of(job: Job, ahead: Ahead, rank: int, wire: RowWire) -> list[RowLane]:
    """Of a rank, with room for its slots."""
    lanes = []
    for group in job.groups:
        for layout in lay_out(group.space, job.plan, rank):
            check_whole_rows(layout)
            most = int(layout.bounds[-1])
            spare = most if ahead.cache_rows is None else min(most, ahead.cache_rows)
            alone = job.num_ranks == 1
            room = 0 if alone else spare
            lanes.append(RowLane(layout, group, job.seed, wire, room, job.make_room))
    return lanes


def _num_touched(announced: Announcement) -> int:
    """Rows of all ranks, a row once for each rank that reads it."""
    return sum(len(rows) for lane in announced.rows for rows in lane)
