"""What ranks do in steps of ``lookahead``, counted as in :mod:`pibroch.sim.counting`.

Each rank has its own oracle, as in a run, and the order of things is that of
:class:`pibroch.exchange.lookahead.exchange.LookaheadExchange`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.exchange.alltoall.row_lane import RowLane
from pibroch.exchange.layout import lay_out
from pibroch.exchange.lookahead.announcement import (
    Announcement,
    Announcer,
    BytesByPurpose,
    Prepared,
    prepare,
)
from pibroch.exchange.lookahead.build import check_whole_rows
from pibroch.exchange.lookahead.carrier import Carrier
from pibroch.exchange.lookahead.oracle import JointOracle, Oracle, StepPlan
from pibroch.exchange.rows import pool, room_for
from pibroch.kernels.arrays import Ints, Records
from pibroch.kernels.window import Transfer
from pibroch.sim.counting import LEARNING_RATE, Job, StepCount, timed
from pibroch.sim.lockstep import Clock, Operation, lockstep, virtual_wire


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
class _Rank:
    """What a rank holds."""

    lanes: list[RowLane]
    carriers: list[Carrier]
    announcer: Announcer
    oracle: JointOracle


@dataclass(slots=True)
class _Batch:
    """A step that was announced, for each rank."""

    batches: list[JaggedBatch]
    announced: list[Announcement]
    ids: list[int]
    operations: list[Operation]


def count_lookahead(
    job: Job, ahead: Ahead, num_steps: int, warm_up: int = 3, clock: Clock | None = None
) -> list[StepCount]:
    """Steps of ``lookahead`` one by one, after some whose slots fill.

    Args:
        job: what is trained.
        ahead: and how.
        num_steps: that are counted.
        warm_up: steps before them.
        clock: to time the work.
    """
    return _Ranks(job, ahead, clock).count(num_steps, warm_up)


class _Ranks:
    """All ranks, and the steps that they know."""

    def __init__(self, job: Job, ahead: Ahead, clock: Clock | None) -> None:
        self._job = job
        self._ahead = ahead
        self._clock = clock
        self._ranks = range(job.num_ranks)
        self._all = [_rank(job, ahead, rank) for rank in self._ranks]
        self._wire = self._all[0].lanes[0].wire
        self._known: deque[_Batch] = deque()
        self._num_read = 0

    def count(self, num_steps: int, warm_up: int) -> list[StepCount]:
        """See :func:`count_lookahead`."""
        while len(self._known) < self._ahead.lookahead + 2:
            self._read()
        opened, _ = timed("open", lambda rank: self._all[rank].oracle.open(), self._ranks, None)
        self._carry("open", [[each.now for each in own] for own in opened])
        if all(each.prefetch is not None for own in opened for each in own):
            self._carry("open", [[each.prefetch for each in own] for own in opened])
        places = [[each.places for each in own] for own in opened]
        counts = []
        for number in range(warm_up + num_steps):
            count, places = self._step(number + 1, places)
            if number >= warm_up:
                counts.append(count)
        return counts

    def _step(
        self, number: int, places: list[list[Ints]]
    ) -> tuple[StepCount, list[list[Ints]]]:
        count = StepCount()
        step = self._known.popleft()
        plans, planned = timed(
            "plan", lambda rank: self._all[rank].oracle.plan(), self._ranks, self._clock
        )
        touched = [sum(len(rows) for lane in each.rows for rows in lane) for each in step.announced]
        planned.parts[0][:, 0] = touched
        pooled, pools = timed("pool", lambda rank: self._pooled(step, places, rank), self._ranks, self._clock)
        gradients = [[part.fill_(1e-3) for part in own] for own in pooled]
        sums, combined = timed(
            "combine", lambda rank: self._sums(step, gradients, plans, rank), self._ranks, self._clock
        )
        for operation in (pools, combined):
            for rank, of_rank in enumerate(self._all):
                rows = sum(map(len, places[rank]))
                width = 4 * float(np.mean([lane.layout.width for lane in of_rank.lanes]))
                operation.parts[0][rank] = step.ids[rank], rows, rows * width, 0, step.ids[rank] * width
        _, local = timed(
            "local", lambda rank: self._local(plans[rank], sums[rank], number), self._ranks, self._clock
        )
        for rank in self._ranks:
            rows = sum(len(plan.local.places) for plan in plans[rank])
            local.parts[0][rank, 1:3] = rows, sum(
                len(plan.local.places) * 4 * lane.layout.width
                for plan, lane in zip(plans[rank], self._all[rank].lanes, strict=True)
            )
        for operation in (pools, combined, planned, local):
            count.add(operation)
        num_sums = [[len(lane.grouped.rows) for lane in each.here.lanes] for each in step.announced]
        count.add(self._run("critical", lambda rank: [
            carrier.update(plan.critical, own, first, carrier.hyper(LEARNING_RATE, number), number, "critical", None)
            for carrier, plan, own, first in zip(self._all[rank].carriers, plans[rank], sums[rank], num_sums[rank], strict=True)
        ]))
        settle = self._run("settle", lambda rank: [
            carrier.settle(plan, own, carrier.hyper(LEARNING_RATE, number), number, None)
            for carrier, plan, own in zip(self._all[rank].carriers, plans[rank], sums[rank], strict=True)
        ]) if plans[0][0].is_tight else None
        deliver = self._carry("deliver", [[plan.next_step for plan in own] for own in plans])
        _count_rows(deliver, [[[plan.next_step] for plan in own] for own in plans])
        count.add(deliver)
        if settle is None:
            settle = self._run("settle", lambda rank: [
                carrier.settle(plan, own, carrier.hyper(LEARNING_RATE, number), number, None)
                for carrier, plan, own in zip(self._all[rank].carriers, plans[rank], sums[rank], strict=True)
            ])
        count.add(settle)
        for operation in self._read():
            count.add(operation)
        count.num_slots = np.array([sum(c.num_cached for c in each.carriers) for each in self._all])
        return count, [[plan.places for plan in own] for own in plans]

    def _read(self) -> list[Operation]:
        """Read, prepare and announce one more batch, and give it to the oracles."""
        batches, read = timed(
            "read", lambda rank: self._job.batch_of(self._num_read, rank), self._ranks, self._clock
        )
        ids = [batch.values.numel() for batch in batches]
        prepared, grouped = timed(
            "prepare", lambda rank: prepare(self._all[rank].lanes, batches[rank]), self._ranks, self._clock
        )
        for operation in (read, grouped):
            operation.parts[0][:, 0] = ids
        announced, operation = lockstep(
            "announce",
            self._wire,
            [[each.announcer.announce(own, True)] for each, own in zip(self._all, prepared, strict=True)],
            ids,
            self._clock,
        )
        own = [each[0] for each in announced]
        _, added = timed("add", lambda rank: self._all[rank].oracle.add(own[rank].rows), self._ranks, self._clock)
        added.parts[0][:, 0] = [sum(len(rows) for lane in each.rows for rows in lane) for each in own]
        operations = [read, grouped, operation, added]
        self._known.append(_Batch(batches, own, ids, operations))
        self._num_read += 1
        return operations

    def _pooled(self, step: _Batch, places: list[list[Ints]], rank: int) -> list[Tensor]:
        room = room_for(self._job.groups, step.batches[rank])
        return [
            pool(here.ids, *carrier.read(rows, here.row_of_position), carrier.shard.dim, room)
            for carrier, here, rows in zip(
                self._all[rank].carriers, step.announced[rank].here.lanes, places[rank], strict=True
            )
        ]

    def _sums(
        self, step: _Batch, gradients: list[list[Tensor]], plans: Sequence[Sequence[StepPlan]], rank: int
    ) -> list[Records]:
        announced = step.announced[rank]
        return [
            carrier.sums(here.grouped, here.ids.gradient_rows(gradient), announced.share, plan)
            for carrier, here, gradient, plan in zip(
                self._all[rank].carriers, announced.here.lanes, gradients[rank], plans[rank], strict=True
            )
        ]

    def _local(self, plans: Sequence[StepPlan], sums: Sequence[Records], number: int) -> None:
        raise NotImplementedError

    def _run(self, name: str, generators: Callable[[int], list]) -> Operation:
        _, operation = lockstep(
            name, self._wire, [generators(rank) for rank in self._ranks], [0] * len(self._ranks), self._clock
        )
        return operation

    def _carry(self, name: str, transfers: list[list[Transfer]]) -> Operation:
        return self._run(name, lambda rank: [
            carrier.carry({name: transfer})
            for carrier, transfer in zip(self._all[rank].carriers, transfers[rank], strict=True)
        ])
