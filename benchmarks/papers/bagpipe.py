"""BagPipe (SOSP'23): lookahead beside one all-to-all, Table 3 and Figures 8, 9, 11 and 16.

Ids are drawn by the counts of the Kaggle log, which are extrapolated from a sample of it: 16,384
samples a step, dim 48, 200 batches ahead, one V100 a host. The paper's *ideal* system, which sends
no rows, takes 30 ms a step at 10 Gbit/s and 19 at 25; less what a ring takes there for the sum of
the dense gradients, that is what dense layers take here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import pibroch as pb
from benchmarks.papers.points import Point
from benchmarks.planner_cases import criteo
from benchmarks.registry import Options
from pibroch.embedding import Table, group_tables
from pibroch.exchange.alltoall.row_lane import RowLane
from pibroch.models import build_model
from pibroch.planner import Placement, Plan
from pibroch.planner.profile import AccessProfile
from pibroch.sim.cluster import Cluster, bytes_per_second
from pibroch.sim.counting import Job, StepCount, count
from pibroch.sim.machine import DenseCost, Machine
from pibroch.sim.prediction import Conditions, Prediction, predict
from pibroch.sim.recipe import dense_cost
from pibroch.sim.sampled import RowReads, count_sampled_lookahead
from pibroch.sim.steps import Dense

PAPER = "BagPipe"
DIM = 48
NUM_DENSE = 13
LOOKAHEAD = 200
SAMPLES = 2048
"""Of a trainer: 16,384 of eight."""
IDEAL_S = {"10gbit": 0.030, "25gbit": 0.019}
IDEAL_TRAINERS = 8
CACHE_MB = {5: 39.6, 10: 66.7, 50: 235.2, 100: 410.5, 200: 720.6, 300: 1003.3}
"""Table 3."""
TRAINERS = (2, 4, 8, 16, 32)
SAMPLES_PER_SECOND = {16: 320e3, 32: 446e3}
"""What the text says of Figure 16."""
BAGPIPE_MS = 56.0
STEPS = 4
MOST_SHARE = 1 - 1e-9
Floats = NDArray[np.float64]


class Log:
    """The log's ids, by how often each is there."""

    def __init__(self, profile: AccessProfile) -> None:
        self.names = tuple(profile.tables)
        self.num_samples = profile.num_samples
        self.accesses = [each.accesses for each in profile.tables.values()]
        self._until = [np.cumsum(each) for each in self.accesses]
        self.tables = [
            Table(name, len(each), DIM)
            for name, each in zip(self.names, self.accesses, strict=True)
        ]

    def batch_of(self, step: int, rank: int) -> pb.JaggedBatch:
        """Drawn ids; each feature for itself."""
        rng = np.random.default_rng([step, rank])
        ids = np.stack(
            [
                np.searchsorted(until, rng.integers(until[-1], size=SAMPLES), side="right")
                for until in self._until
            ]
        )
        dense = torch.zeros(SAMPLES, NUM_DENSE)
        return pb.JaggedBatch.from_one_hot(dense, self.names, torch.from_numpy(ids), dense[:, 0])

    def shares(self, table: int) -> Floats:
        """Of samples that have each row of a table."""
        own: Floats = np.minimum(self.accesses[table] / self.num_samples, MOST_SHARE)
        return own

    def distinct(self, num_samples: int) -> float:
        """Rows that so many samples have, each once."""
        return sum(
            float(-np.expm1(num_samples * np.log1p(-self.shares(table))).sum())
            for table in range(len(self.names))
        )

    def rates(self, job: Job, lanes: Sequence[RowLane]) -> list[RowReads]:
        """Of rows by address, see :func:`~pibroch.sim.sampled.read_rates`."""
        reads = []
        places = {name: table for table, name in enumerate(self.names)}
        for lane in lanes:
            tables = [places[name] for name in lane.layout.features]
            sizes = [len(self.accesses[table]) for table in tables]
            ids, _ = lane.resolve(every_row(lane.layout.features, sizes))
            rates = np.zeros(int(lane.layout.bounds[-1]))
            whole = np.concatenate([self.shares(table) for table in tables])
            rates[ids.row_ids] = -SAMPLES * np.log1p(-whole)
            addresses = np.flatnonzero(rates)
            reads.append(RowReads(addresses, rates[addresses]))
        return reads


def every_row(features: Sequence[str], sizes: Sequence[int]) -> pb.JaggedBatch:
    """A sample with all rows of its tables."""
    return pb.JaggedBatch(
        torch.zeros(1, 1),
        tuple(features),
        torch.from_numpy(np.concatenate([np.arange(size) for size in sizes])),
        torch.from_numpy(np.cumsum([0, *sizes])),
        torch.zeros(1),
    )


@dataclass(frozen=True, slots=True)
class Counted:
    """Steps of so many trainers: ours ahead, rows all at once, and pooled vectors."""

    num_ranks: int
    lookahead: Sequence[StepCount]
    rows: Sequence[StepCount]
    pooled: Sequence[StepCount]
    error: float

    @classmethod
    def of(cls, log: Log, num_ranks: int) -> Counted:
        """Counted over a sample of rows, or over all."""
        groups = group_tables(log.tables, pb.Adagrad(lr=0.1))
        # owners by number, so that each holds as many tables as another or one more
        owners = {
            table.name: Placement(kind="table_wise_pooled", shards=(number % num_ranks,))
            for number, table in enumerate(log.tables)
        }
        plans = Plan.of(log.tables, num_ranks), Plan(num_shards=num_ranks, placements=owners)
        jobs = [Job(groups, plan, log.batch_of) for plan in plans]
        of_window = jobs[0].under(pb.Lookahead(lookahead=LOOKAHEAD))
        ahead, error = count_sampled_lookahead(of_window, 1, STEPS, 0, log.rates)
        rows, pooled = (count(job, 2) for job in jobs)
        return cls(num_ranks, ahead, rows, pooled, error)

    def on(self, name: str, link: str) -> Prediction:
        """A step."""
        machine = Machine.load("v100")
        rate = bytes_per_second(link)
        cluster = Cluster(self.num_ranks, 1, rate, rate, float(machine.cores))
        dense = Dense(dense_seconds(machine, link), SAMPLES)
        return predict(getattr(self, name), Conditions(cluster, machine, dense))


def dense_seconds(machine: Machine, link: str) -> DenseCost:
    """What is left of the ideal system's step without the sum of its dense gradients."""
    widths: dict[str, Any] = {"bottom": (512, 256, 64), "top": (1024, 1024, 1024, 256, 128)}
    model = build_model("dlrm", NUM_DENSE, 26, [f"C{n}" for n in range(26)], dim=DIM, **widths)
    cost = dense_cost(model, machine, 1.0)
    ring = 2 * (1 - 1 / IDEAL_TRAINERS) * cost.early_bytes / bytes_per_second(link)
    sample = (IDEAL_S[link] - ring) / SAMPLES
    return cost.model_copy(update={"forward": (0.0, sample / 3), "backward": (0.0, 2 / 3 * sample)})


def points(options: Options) -> Iterator[Point]:
    """All that is compared; five minutes on two cores."""
    cases = criteo(options)
    if not cases:
        return
    log = Log(cases[0].profile)
    for lookahead, in_paper in CACHE_MB.items():
        rows = log.distinct(8 * SAMPLES * lookahead)
        setting = f"Kaggle, {8 * SAMPLES:,} samples a step, {lookahead} ahead"
        yield Point(PAPER, "Table 3", setting, "MB of cache", in_paper, rows * 4 * DIM / 1e6)
    yield from of_rows(log)
    for num_ranks in (2,) if options.quick else TRAINERS:
        options.say(f"BagPipe: {num_ranks} trainers")
        yield from of_trainers(Counted.of(log, num_ranks))


def of_trainers(counted: Counted) -> Iterator[Point]:
    """Of steps of so many."""
    size = counted.num_ranks
    setting = f"{size} V100, 10 Gbit/s, DLRM"
    point = partial(Point, PAPER)
    ours = {link: counted.on("lookahead", link) for link in IDEAL_S}
    for name, what in (("rows", "all rows at once"), ("pooled", "pooled vectors")):
        for link in IDEAL_S:
            theirs = counted.on(name, link)
            in_paper = None
            if size == IDEAL_TRAINERS and name == "pooled":
                in_paper = 2.1 if link == "10gbit" else 2.1 * 1.9 / 2.4
            yield point(
                "Fig. 9 and 11",
                setting.replace("10 Gbit/s", link.replace("gbit", " Gbit/s")),
                f"throughput, lookahead over {what}",
                in_paper,
                theirs.step_s / ours[link].step_s,
            )
    yield point(
        "Fig. 16a",
        setting,
        "samples/s",
        SAMPLES_PER_SECOND.get(size),
        ours["10gbit"].samples_per_second,
    )
    if size == IDEAL_TRAINERS:
        yield point("Fig. 15", setting, "ms a step", BAGPIPE_MS, 1e3 * ours["10gbit"].step_s)
        share = critical_share(counted.lookahead)
        yield point("Fig. 8", setting, "share of sent gradients that are waited for", None, share)


def of_rows(log: Log) -> Iterator[Point]:
    """Rows of a step of eight trainers (Sec. 3.3): as many as the log has on average."""
    setting = f"Kaggle, {IDEAL_TRAINERS} x {SAMPLES:,} samples"
    point = partial(Point, PAPER, "Sec. 3.3", setting)
    num_samples = IDEAL_TRAINERS * SAMPLES
    several = urgent = 0.0
    for table in range(len(log.names)):
        logs = np.log1p(-log.shares(table))
        by_one = -np.expm1(SAMPLES * logs)
        by_two = 1 - (1 - by_one) ** IDEAL_TRAINERS
        by_two -= IDEAL_TRAINERS * by_one * (1 - by_one) ** (IDEAL_TRAINERS - 1)
        several += float(by_two.sum())
        urgent += float((by_two * -np.expm1(num_samples * logs)).sum())
    yield point("thousand rows that are read", 65.0, log.distinct(num_samples) / 1e3)
    yield point("thousand rows that several trainers read", 48.0, several / 1e3)
    yield point("share of these that the next step reads", 22.7 / 48.0, urgent / several)


def critical_share(counts: Sequence[StepCount]) -> float:
    """Of gradients that are sent, those that the next step's rows need."""
    rows_out = 3
    urgent, rest = (
        sum(float(each[name].parts[0][:, rows_out].sum()) for each in counts)
        for name in ("critical", "settle")
    )
    return urgent / (urgent + rest)
