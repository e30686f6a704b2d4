"""What ranks do in some steps of training, counted by running what they run.

Lanes, carriers, announcers and oracles are those of a run, a set for each rank in this process;
batches are given. What is counted: bytes from rank to rank of each message, and what the work
between messages is about, whose time a :class:`~pibroch.sim.machine.Machine` knows. With a clock
the work is timed, which is how such a machine is calibrated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.embedding import TableGroup
from pibroch.embedding.shard import MakeRoom
from pibroch.exchange.alltoall.build import groups_under
from pibroch.exchange.alltoall.lane import Lane, Route
from pibroch.exchange.messages import Joined, joined
from pibroch.exchange.rows import room_for
from pibroch.kernels.arrays import Ints, Records
from pibroch.kernels.memory import empty_rows
from pibroch.planner import Plan
from pibroch.sim.alone import RowRuns, one_record
from pibroch.sim.cluster import Flow
from pibroch.sim.held import held_bytes
from pibroch.sim.lockstep import FEATURES, Clock, Operation, lockstep, virtual_wire

T = TypeVar("T")
BatchOf = Callable[[int, int], JaggedBatch]
"""Gives the part of a rank of the global batch of a step."""
LEARNING_RATE = 1e-3
GRADIENT = 1e-3
"""Of each embedding, so that updates do what they always do."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained, and on which ranks.

    Attributes:
        groups: of all tables.
        plan: where their rows lie.
        batch_of: the batches.
        every_batch: gives all samples of training, each once, where more ranks are predicted than
            are counted.
        replicas: see :class:`pibroch.AllToAll`.
        wire: the type in which rows travel.
        seed: of the rows; ``None`` where only bytes are wanted: then all rows are one in memory.
    """

    groups: Sequence[TableGroup]
    plan: Plan
    batch_of: BatchOf
    replicas: str = "gather"
    wire: str = "float32"
    seed: int | None = None
    every_batch: Callable[[], Iterator[JaggedBatch]] = lambda: iter(())

    @property
    def num_ranks(self) -> int:
        """W."""
        return self.plan.num_shards

    @property
    def has_numbers(self) -> bool:
        """Whether rows, embeddings and gradients are made, and not counted alone."""
        return self.seed is not None

    @property
    def make_room(self) -> MakeRoom:
        """For the rows."""
        return empty_rows if self.has_numbers else one_record

    @property
    def read_at(self) -> int | None:
        """As of which step rows are fetched.

        With one, owners that pool read rows before, whose kernel may not read one record as many.
        """
        return None if self.has_numbers else 0


@dataclass(frozen=True, slots=True)
class StepCount:
    """One step of all ranks.

    Attributes:
        operations: that it takes.
        num_slots: in use on each rank after it, for records whose home is elsewhere and weights
            that are borrowed.
        held: bytes of memory that each rank holds in it beside rows, by what they are, ``[W]``.
    """

    operations: Sequence[Operation]
    num_slots: NDArray[np.int64] | None = None
    held: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Operation:
        """The operation of this name."""
        return next(each for each in self.operations if each.name == name)

    def has(self, name: str) -> bool:
        """Whether there is an operation of this name."""
        return any(each.name == name for each in self.operations)

    @property
    def sent(self) -> Ints:
        """Bytes from rank to rank, ``[W, W]``, dense gradients left out; all ranks counted."""
        parts = [
            sent for each in self.operations for sent in each.sent if not isinstance(sent, Flow)
        ]
        total: Ints = np.sum(parts, axis=0, dtype=np.int64)
        return total


def count_alltoall(job: Job, num_steps: int, clock: Clock | None = None) -> list[StepCount]:
    """Steps of ``alltoall``, one by one."""
    ranks = range(job.num_ranks)
    wires = [virtual_wire(rank, job.num_ranks, job.wire) for rank in ranks]
    groups = [
        groups_under(job.groups, job.plan, job.seed, wire, job.replicas, job.make_room)
        for wire in wires
    ]
    lanes: list[list[Lane]] = [[lane for each in own for lane in each.lanes] for own in groups]
    width = float(np.mean([lane.layout.width for lane in lanes[0]]))
    of_rows = RowRuns(job.has_numbers, width, clock)
    steps = []
    for number in range(num_steps):
        batches, read = timed("read", partial(job.batch_of, number), ranks, clock)
        ids = [batch.values.numel() for batch in batches]
        read.parts[0][:, 0] = ids
        routing = [joined([lane.route(batches[rank]) for lane in lanes[rank]]) for rank in ranks]
        routes, routed = lockstep("route", wires[0], routing, ids, width, clock)
        step = _Step(job, number, batches, routes, of_rows)
        rows, fetched = of_rows.run("fetch", wires[0], step.fetch, ids)
        pooled, pools = timed("pool", partial(step.pool, rows), ranks, clock)
        gradients = [of_rows.gradients(own, GRADIENT) for own in pooled]
        sums, combined = timed("combine", partial(step.combine, gradients), ranks, clock)
        for rank in ranks:
            num_rows = sum(map(len, rows[rank]))
            about = ids[rank], num_rows, 4 * width * num_rows, 0, 4 * width * ids[rank]
            pools.parts[0][rank] = combined.parts[0][rank] = about
        _, updated = of_rows.run("update", wires[0], partial(step.update, sums), ids)
        operations = [read, routed, fetched, pools, combined, updated]
        held = [
            # a batch and the next one; embeddings with their gradients
            {
                "batches": 2 * held_bytes(batches[rank], routes[rank], but=lanes[rank]),
                "messages": held_bytes(rows[rank], pooled[rank], sums[rank])
                + held_bytes(pooled[rank]),
            }
            for rank in ranks
        ]
        steps.append(StepCount(operations, held=of_ranks(held, operations)))
    return steps


def of_ranks(
    held: Sequence[Mapping[str, int]], operations: Sequence[Operation]
) -> dict[str, NDArray[np.float64]]:
    """What each rank holds by name, ``[W]``, with its largest message going out and coming in."""
    whole = {name: np.array([own[name] for own in held], float) for name in held[0]}
    bytes_in, bytes_out = (FEATURES.index(name) for name in ("bytes_in", "bytes_out"))
    largest = np.zeros(len(held))
    for each in operations:
        for before, after in pairwise(each.parts if each.sent else ()):
            largest = np.maximum(largest, before[:, bytes_out] + after[:, bytes_in])
    whole["messages"] += largest
    return whole


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


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of ``alltoall`` whose routes are known.

    Attributes:
        job: of it.
        number: from 0.
        batches: of each rank.
        routes: of each rank and lane.
        of_rows: runs what sends rows.
    """

    job: Job
    number: int
    batches: Sequence[JaggedBatch]
    routes: Sequence[Sequence[Route]]
    of_rows: RowRuns

    def fetch(self, rank: int) -> Joined[list[Records]]:
        """What owners send to each other."""
        return joined([route.fetch(self.job.read_at) for route in self.routes[rank]])

    def pool(self, rows: Sequence[list[Records]], rank: int) -> list[Tensor]:
        """A rank's embeddings."""
        room = room_for(self.job.groups, self.batches[rank])
        pairs = zip(self.routes[rank], self.of_rows.given(rows[rank]), strict=True)
        return self.of_rows.kept([route.pool(np.asarray(own), room) for route, own in pairs])

    def combine(self, gradients: Sequence[list[Tensor]], rank: int) -> list[Tensor]:
        """What owners need of their gradients."""
        pairs = zip(self.routes[rank], gradients[rank], strict=True)
        return self.of_rows.kept([route.combine(gradient) for route, gradient in pairs])

    def update(self, sums: Sequence[list[Tensor]], rank: int) -> Joined[list[None]]:
        """Gradients to owners, who update."""
        pairs = zip(self.routes[rank], self.of_rows.given(sums[rank]), strict=True)
        step = self.number + 1
        return joined([route.update(total, LEARNING_RATE, step) for route, total in pairs])
