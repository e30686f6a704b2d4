"""Steps of ``lookahead`` of many ranks, counted over a sample of rows by one rank's oracles.

An oracle sees the rows of all W ranks, so those of all ranks are W² of work. But what a step does
with a row depends on that row alone: who reads it when. So rows of a sample say what all rows do,
each for as many as it stands for. Hot rows are few and read by many ranks, cold ones many and read
by few: rows are sampled by how often they are read.

Who reads a row is drawn: each rank in each step with the probability that a batch of it has the
row, by the samples of training. Of what two ranks exchange the reader's half is counted, which is
alike on all ranks; all homes together give what all readers get.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pibroch.collectives.ranks import Channel, Ranks
from pibroch.embedding.shard import rows_made_by
from pibroch.errors import ConfigError
from pibroch.exchange.alltoall.row_lane import RowLane
from pibroch.exchange.layout import lay_out
from pibroch.exchange.lookahead.announcement import prepare
from pibroch.exchange.lookahead.build import Lookahead, check_whole_rows, steps_of
from pibroch.exchange.lookahead.exchange import SCHEDULE
from pibroch.exchange.lookahead.oracle import Oracle, RowsOfRanks, StepPlan
from pibroch.exchange.lookahead.oracle.kernels.window import MAX_RANKS
from pibroch.exchange.rows import room_for
from pibroch.exchange.wire import RowWire
from pibroch.kernels.arrays import Ints, distinct
from pibroch.sim.counting import Job, StepCount, one_record
from pibroch.sim.held import held_bytes
from pibroch.sim.mirrored import OfOneRank, of_all
from pibroch.sim.world import NoNetwork

READ_BEYOND = 2
"""Batches that are read beyond those that a plan needs, see ``LookaheadExchange.feed``."""
STRATA = 5
READS = 240_000
"""Of sampled rows by all ranks, in the steps of a window and a stratum; some more where few rows
have many.
"""
LEAST_ROWS = 48
"""Of a stratum, where it has as many."""
OFTEN = 0.1
"""Rows with more reads of a batch are asked rank by rank whether they are read."""
DRAWS = 4
"""Samples of rows and reads, each of its own; they say how far one is off."""
SLOTS_PER_ROW = 4
"""For a record, and for weights that are borrowed for this step and the next."""
MOST_SHARE = 1 - 1e-6
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RowReads:
    """Rows of a lane that training reads.

    Attributes:
        addresses: rising.
        rates: of each, reads of a batch: a rank reads it in a step with ``1 - exp(-rate)``.
    """

    addresses: Ints
    rates: Floats

    def strata(self) -> Iterator[Ints]:
        """Numbers of rows, those that are read most first; each stratum has as many reads."""
        if not len(self.rates):
            return
        order = np.argsort(-self.rates, kind="stable")
        reads = np.cumsum(-np.expm1(-self.rates[order]))
        bounds = np.searchsorted(reads, reads[-1] * np.arange(1, STRATA) / STRATA)
        yield from (each for each in np.split(order, bounds) if len(each))


def count_sampled_lookahead(
    job: Job,
    ranks_per_host: int,
    num_steps: int,
    seed: int = 0,
    rates: Callable[[Job, Sequence[RowLane]], Sequence[RowReads]] | None = None,
) -> tuple[list[StepCount], float]:
    """Steps of ``lookahead`` of all ranks, by samples of their rows.

    Args:
        job: what is trained, with slots for all rows of the window.
        ranks_per_host: of each host, which their messages do not leave.
        num_steps: that are counted, after as many as are looked ahead.
        seed: of the samples.
        rates: says how often rows are read; :func:`read_rates` when absent.

    Returns:
        The steps, and the relative standard error of their bytes.

    Raises:
        ConfigError: for more ranks than an oracle plans for, or too few slots.
    """
    size = job.num_ranks
    if size > MAX_RANKS:
        raise ConfigError(
            f"{size:,} ranks under lookahead",
            f"at most {MAX_RANKS}, as in a run",
            "lower --hosts, or pass --set embedding.exchange=alltoall",
        )
    ahead = ahead_of(job)
    lanes = lanes_of(job)
    reads = (rates or read_rates)(job, lanes)
    done = []
    slots = np.zeros((DRAWS, num_steps))
    for number in range(DRAWS):  # one after another, as each is large
        draw = _Draw(job, ahead, lanes, reads, np.random.default_rng([seed, number]))
        draw.open()
        of_steps = []
        for step in range(num_steps):
            of_steps.append(draw.step())
            slots[number, step] = draw.num_slots
        done.append(of_steps)
    in_use = slots.mean(0)
    most = float(in_use.max())
    if ahead.cache_rows is not None and most > ahead.cache_rows:
        raise ConfigError(
            f"{most:,.0f} slots in use on each of {size:,} ranks, and {ahead.cache_rows:,}",
            "slots for the window, where so many ranks are predicted",
            "raise --set embedding.exchange.cache_rows, or lower the lookahead",
        )
    steps = [
        replace(
            of_all(of_draws, size, ranks_per_host, SCHEDULE), num_slots=np.full(size, round(used))
        )
        for of_draws, used in zip(zip(*done, strict=True), in_use, strict=True)
    ]
    of_draw = np.array(
        [
            np.mean([sum(sum(each.sent) for each in operations) for operations, _ in of_steps])
            for of_steps in done
        ]
    )
    error = float(of_draw.std(ddof=1) / np.sqrt(DRAWS) / max(1.0, of_draw.mean()))
    return steps, error


def ahead_of(job: Job) -> Lookahead:
    """How batches of a job are read ahead."""
    assert isinstance(job.exchange, Lookahead), "rows that are read ahead"
    return job.exchange


def lanes_of(job: Job) -> list[RowLane]:
    """Of rank 0, with rows that take no memory, and no slots."""
    ranks = Ranks(0, job.num_ranks)
    wire = RowWire(Channel(ranks, NoNetwork()), ahead_of(job).wire)
    layouts = [(each, lay_out(each.space, job.plan, 0)) for each in job.groups]
    for layout in (layout for _, of_group in layouts for layout in of_group):
        check_whole_rows(layout)
    with rows_made_by(one_record):
        return [RowLane(own, group, None, wire) for group, of_group in layouts for own in of_group]


def read_rates(job: Job, lanes: Sequence[RowLane]) -> list[RowReads]:
    """How often each row of each lane is read, by all samples of training."""
    counts = [np.zeros(int(lane.layout.bounds[-1]), np.int32) for lane in lanes]
    num_samples = 0
    for batch in job.every_batch():
        num_samples += batch.batch_size
        for lane, own in zip(lanes, counts, strict=True):
            ids, _ = lane.resolve(batch.pick(lane.layout.features))
            np.add.at(own, ids.row_ids, 1)
    batch_size = job.batch_of(0, 0).batch_size
    found = []
    for own in counts:
        addresses = np.flatnonzero(own)
        shares = np.minimum(own[addresses] / num_samples, MOST_SHARE)
        found.append(RowReads(addresses, -batch_size * np.log1p(-shares)))
    return found


class _Sample:
    """Rows of a stratum of a lane, and an oracle that knows no others.

    Args:
        reads: of the rows, rising.
        weight: rows that each stands for.
        bounds: of the lane's homes.
        rank: whose view is wanted.
        ahead: how batches are read ahead.
        rng: of the reads.
    """

    def __init__(
        self,
        reads: RowReads,
        weight: float,
        bounds: Ints,
        rank: int,
        ahead: Lookahead,
        rng: np.random.Generator,
    ) -> None:
        num_rows = len(reads.addresses)
        self.weight = weight
        often = reads.rates > OFTEN
        self._often = np.flatnonzero(often)
        self._seldom = np.flatnonzero(~often)
        self._shares = -np.expm1(-reads.rates[often]).astype(np.float32)
        self._totals = reads.rates[~often]
        self._num_rows = num_rows
        self._size = len(bounds) - 1
        self._rank = rank
        self._rng = rng
        homes = np.searchsorted(reads.addresses, bounds)
        slots = SLOTS_PER_ROW * num_rows
        self.oracle = Oracle(homes, rank, steps_of(ahead), slots, ahead.cache, ahead.delayed_sync)

    def read(self) -> None:
        """Draw one more step, and give it to the oracle."""
        size = self._size
        num_rows = self._num_rows
        shape = (size, len(self._often))
        ranks, which = np.nonzero(self._rng.random(shape, np.float32) < self._shares)
        often = ranks * num_rows + self._often[which]
        rows = np.repeat(self._seldom, self._rng.poisson(size * self._totals))
        seldom = self._rng.integers(0, size, len(rows)) * num_rows + rows
        # a rank that reads a row several times in a batch has it once
        reads = distinct(np.concatenate([often, seldom])) if len(seldom) else often
        bounds = np.searchsorted(reads, np.arange(size + 1) * num_rows)
        self.oracle.add(RowsOfRanks(reads % num_rows, bounds))

    def plan(self) -> tuple[Floats, float]:
        """What the next step moves (:data:`_MOVED`), and slots in use: of all rows."""
        plan = self.oracle.plan()
        return self.weight * _moved(plan), self.weight * float(plan.used[self._rank])


_MOVED = (
    "next",
    "next weights",
    "early",
    "early weights",
    "evicted",
    "critical",
    "deferred",
    "local",
)


def _moved(plan: StepPlan) -> Floats:
    """Of a plan as its rank sees it: records and weights that come, sums that go, updates here."""
    early = np.zeros(2) if plan.prefetch is None else plan.prefetch.counts[2:].sum(1)
    return np.array(
        [
            *plan.next_step.counts[2:].sum(1),
            *early,
            sum(each.counts[0].sum() for each in plan.evicted),
            plan.critical.counts[0].sum(),
            plan.deferred.counts[0].sum(),
            len(plan.local.places),
        ],
        float,
    )


class _Draw:
    """One rank, with samples of the rows of all lanes."""

    def __init__(
        self,
        job: Job,
        ahead: Lookahead,
        lanes: Sequence[RowLane],
        reads: Sequence[RowReads],
        rng: np.random.Generator,
    ) -> None:
        self._job = job
        self._ahead = ahead
        self._lanes = lanes
        self._rank = int(rng.integers(job.num_ranks))
        self._samples = [
            list(_samples(own, lane, self._rank, ahead, rng))
            for own, lane in zip(reads, lanes, strict=True)
        ]
        self._number = 0
        self.num_slots = 0.0

    def open(self) -> None:
        """Begin, and take steps until as many rows come as go."""
        for sample in self._all():
            for _ in range(steps_of(self._ahead) + READ_BEYOND):
                sample.read()
            sample.oracle.open()
            for _ in range(steps_of(self._ahead) + 1):
                sample.plan()
                sample.read()

    def _all(self) -> Iterator[_Sample]:
        for own in self._samples:
            yield from own

    def step(self) -> tuple[list[OfOneRank], dict[str, int]]:
        """What the mean rank does in a step, and what it holds."""
        moved = np.zeros((len(self._lanes), len(_MOVED)))
        self.num_slots = 0.0
        for own, samples in zip(moved, self._samples, strict=True):
            for sample in samples:
                of_sample, slots = sample.plan()
                own += of_sample
                self.num_slots += slots
                sample.read()
        batch = self._job.batch_of(self._number, self._rank)
        self._number += 1
        prepared = prepare(self._lanes, batch)
        rows = [len(lane.grouped.rows) for lane in prepared.lanes]
        # its head, its rows, and the room that is left for more
        message = 8 * (3 + 2 * len(rows)) + 17 / 16 * sum(
            len(lane.encoded) for lane in prepared.lanes
        )
        operations = self._operations(moved, batch.values.numel(), rows, message)
        size = self._job.num_ranks
        num_known = steps_of(self._ahead) + READ_BEYOND
        another = self._job.batch_of(self._number, self._rank)
        sums = [
            (count + sum(own[_MOVED.index(name)] for name in ("critical", "deferred")))
            * lane.shard.dim
            for count, own, lane in zip(rows, moved, self._lanes, strict=True)
        ]
        room = held_bytes(room_for(self._job.groups, batch))
        held = {
            "batches": _held_by_many(num_known, batch, another),
            "announcements": _held_by_many(num_known, prepared, prepare(self._lanes, another)),
            "oracle": sum(
                own[0].oracle.window_bytes(num_known * size * count)
                for own, count in zip(self._samples, rows, strict=True)
                if own
            ),
            "messages": round(2 * room + 4 * sum(sums) + 8 * sum(rows)),
        }
        return operations, held

    def _operations(
        self, moved: Floats, ids: int, rows: Sequence[int], message: float
    ) -> list[OfOneRank]:
        """Those of :data:`pibroch.exchange.lookahead.exchange.SCHEDULE`."""
        size = self._job.num_ranks
        narrow = self._lanes[0].wire.dtype.itemsize
        width = float(np.mean([lane.layout.width for lane in self._lanes]))
        dims = np.array([lane.shard.dim for lane in self._lanes])
        records = np.array([lane.shard.space.shape[1] for lane in self._lanes])
        of = dict(zip(_MOVED, moved.T, strict=True))
        touched = [(size * sum(rows), 0.0, 0.0, 0.0, 0.0)]
        read = [(ids, 0.0, 0.0, 0.0, 0.0)]
        pooled = [(ids, sum(rows), 4 * width * sum(rows), 0.0, 4 * width * ids)]
        local = float(of["local"].sum())
        critical, deferred = (
            _Message(of[name].sum(), 4 * of[name] @ dims, narrow * of[name] @ dims)
            for name in ("critical", "deferred")
        )
        following, leaving = (
            _Message(
                (whole + borrowed) / width, 4 * (whole + borrowed), 4 * whole + narrow * borrowed
            )
            for whole, borrowed in (
                (of["next"] @ records, of["next weights"] @ dims),
                ((of["evicted"] + of["early"]) @ records, of["early weights"] @ dims),
            )
        )
        told = _Message(size * message, size * message, (size - 1) * message)
        return [
            OfOneRank("plan", touched, []),
            OfOneRank("pool", pooled, []),
            OfOneRank("combine", pooled, []),
            OfOneRank("local", [(0.0, local, 4 * width * local, 0.0, 0.0)], []),
            _in_turn("critical", critical),
            _in_turn("deliver", following),
            _in_turn("settle", deferred, leaving),
            OfOneRank("read", read, []),
            OfOneRank("prepare", read, []),
            _in_turn("announce", told),
            OfOneRank("add", touched, []),
        ]


def _held_by_many(number: int, one: object, another: object) -> int:
    """Bytes of so many things like these two; what they share is there once."""
    alone = held_bytes(one)
    return alone + (number - 1) * (held_bytes(one, another) - alone)


class _Message(NamedTuple):
    """As much as a rank sends to all others and gets of them.

    Attributes:
        rows, num_bytes: as :data:`~pibroch.sim.lockstep.FEATURES` count them.
        on_wire: bytes that leave the rank.
    """

    rows: float
    num_bytes: float
    on_wire: float


def _in_turn(name: str, *messages: _Message) -> OfOneRank:
    """An operation of some messages, with work before, between and after them."""
    sizes = [(0.0, 0.0), *((each.rows, each.num_bytes) for each in messages), (0.0, 0.0)]
    parts = [(0.0, *came, *going) for came, going in pairwise(sizes)]
    return OfOneRank(name, parts, [each.on_wire for each in messages])


def _samples(
    reads: RowReads, lane: RowLane, rank: int, ahead: Lookahead, rng: np.random.Generator
) -> Iterator[_Sample]:
    """Of each stratum as many rows, at equal distances, as are read often enough."""
    size = lane.world_size
    of_step = READS / steps_of(ahead)
    for stratum in reads.strata():
        wanted = len(stratum) * of_step / max(1.0, size * -np.expm1(-reads.rates[stratum]).sum())
        count = min(len(stratum), max(LEAST_ROWS, int(np.ceil(wanted))))
        step = len(stratum) / count
        chosen = np.sort(stratum[((np.arange(count) + rng.random()) * step).astype(np.int64)])
        sampled = RowReads(reads.addresses[chosen], reads.rates[chosen])
        yield _Sample(sampled, step, lane.layout.bounds, rank, ahead, rng)
