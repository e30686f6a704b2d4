"""What ranks do in some steps of training, counted by running what they run.

Lanes, carriers, announcers and oracles are those of a run, a set for each rank in this process;
batches are given. What is counted: bytes from rank to rank of each message, and what the work
between messages is about, whose time a :class:`~pibroch.sim.machine.Machine` knows. With a clock
the work is timed, which is how such a machine is calibrated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.embedding import TableGroup
from pibroch.exchange.alltoall.build import groups_under
from pibroch.exchange.alltoall.lane import Lane, Route
from pibroch.exchange.rows import room_for
from pibroch.planner import Plan
from pibroch.sim.lockstep import FEATURES, Clock, Operation, lockstep, virtual_wire

T = TypeVar("T")
BatchOf = Callable[[int, int], JaggedBatch]
"""Gives the part of a rank of the global batch of a step."""
LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained, and on which ranks.

    Attributes:
        groups: of all tables.
        plan: where their rows lie.
        batch_of: the batches.
        replicas: see :class:`pibroch.AllToAll`.
        wire: the type in which rows travel.
        seed: of the rows; ``None`` where only bytes are wanted, and the rows may hold anything.
    """

    groups: Sequence[TableGroup]
    plan: Plan
    batch_of: BatchOf
    replicas: str = "gather"
    wire: str = "float32"
    seed: int | None = None

    @property
    def num_ranks(self) -> int:
        """W."""
        return self.plan.num_shards


@dataclass(slots=True)
class StepCount:
    """One step of all ranks.

    Attributes:
        operations: by name.
        num_slots: records whose home is elsewhere, on each rank.
    """

    operations: dict[str, Operation] = field(default_factory=dict)
    num_slots: NDArray[np.int64] | None = None

    def add(self, operation: Operation) -> None:
        """Note what was done."""
        self.operations[operation.name] = operation

    @property
    def sent(self) -> NDArray[np.int64]:
        """Bytes from rank to rank, ``[W, W]``, dense gradients left out."""
        parts = [sent for each in self.operations.values() for sent in each.sent]
        return np.sum(parts, axis=0, dtype=np.int64)


def count_alltoall(
    job: Job, num_steps: int, first_step: int = 0, clock: Clock | None = None
) -> list[StepCount]:
    """Steps of ``alltoall``, one by one."""
    ranks = range(job.num_ranks)
    wires = [virtual_wire(rank, job.num_ranks, job.wire) for rank in ranks]
    groups = [groups_under(job.groups, job.plan, job.seed, wire, job.replicas) for wire in wires]
    lanes: list[list[Lane]] = [[lane for each in own for lane in each.lanes] for own in groups]
    steps = []
    for number in range(first_step, first_step + num_steps):
        count = StepCount()
        batches, read = timed("read", lambda rank, step=number: job.batch_of(step, rank), ranks, clock)
        ids = [batch.values.numel() for batch in batches]
        read.parts[0][:, 0] = ids
        count.add(read)
        routes, routed = lockstep(
            "route",
            wires[0],
            [[lane.route(batch) for lane in own] for own, batch in zip(lanes, batches, strict=True)],
            ids,
            clock,
        )
        count.add(routed)
        rows, fetched = lockstep(
            "fetch", wires[0], [[route.fetch(None) for route in own] for own in routes], ids, clock
        )
        count.add(fetched)
        pooled, pools = timed("pool", partial(_pooled, job, batches, routes, rows), ranks, clock)
        gradients = [
            [torch.zeros_like(part) for part in own] if clock is None else
            [torch.full_like(part, 1e-3) for part in own]
            for own in pooled
        ]
        sums, combined = timed("combine", partial(_combined, routes, gradients), ranks, clock)
        for operation in (pools, combined):
            operation.parts[0][:] = [
                (num_ids, sum(map(len, of_rank)), sum(part.nbytes for part in of_rank), 0, num_ids * _row_bytes(own))
                for num_ids, of_rank, own in zip(ids, rows, lanes, strict=True)
            ]
            count.add(operation)
        _, updated = lockstep(
            "update",
            wires[0],
            [
                [route.update(total, LEARNING_RATE, number + 1) for route, total in zip(own, totals, strict=True)]
                for own, totals in zip(routes, sums, strict=True)
            ],
            ids,
            clock,
        )
        count.add(updated)
        steps.append(count)
    return steps


def timed(
    name: str, work: Callable[[int], T], ranks: range, clock: Clock | None
) -> tuple[list[T], Operation]:
    """Work of each rank that sends nothing."""
    results = []
    seconds = np.zeros(len(ranks))
    for rank in ranks:
        begin = clock() if clock else 0.0
        results.append(work(rank))
        seconds[rank] = clock() - begin if clock else 0.0
    return results, Operation(name, [np.zeros((len(ranks), len(FEATURES)))], [], [seconds])


def _pooled(
    job: Job,
    batches: Sequence[JaggedBatch],
    routes: Sequence[Sequence[Route]],
    rows: Sequence[Sequence[NDArray[np.float32]]],
    rank: int,
) -> list[Tensor]:
    room = room_for(job.groups, batches[rank])
    return [route.pool(own, room) for route, own in zip(routes[rank], rows[rank], strict=True)]


def _combined(
    routes: Sequence[Sequence[Route]], gradients: Sequence[Sequence[Tensor]], rank: int
) -> list[Tensor]:
    pairs = zip(routes[rank], gradients[rank], strict=True)
    return [route.combine(gradient) for route, gradient in pairs]


def _row_bytes(lanes: Sequence[Lane]) -> float:
    """Of the mean lane's rows."""
    return 4 * float(np.mean([lane.layout.width for lane in lanes]))
