"""Section ``copies`` of topic ``planner``.

Training under plans with copied rows, on hosts of the lab.

Bytes and time by how the rows' gradients are summed (OPER, Fig. 9b), beside row-wise placement.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import pibroch as pb
from benchmarks.agreement import check_agreement
from benchmarks.cases import Arrays, Case
from benchmarks.comparison import Lineup, noise_note
from benchmarks.hosts import Outcome, measure_at, middle, ratios
from benchmarks.lab import Lab
from benchmarks.load import ForeignLoad
from benchmarks.registry import Options
from benchmarks.results import Row
from benchmarks.runner import Schedule
from benchmarks.team import teams
from benchmarks.workloads import Workload
from pibroch.planner.make import PlanOptions, make_plan
from pibroch.planner.partition import sizes_of
from pibroch.planner.profile import AccessProfile, TableCounts
from pibroch.planner.store import save_plan
from pibroch.planner.topology import ClusterTopology

RATE = "1gbit"
BATCH_SIZE = 2048
NUM_TABLES = 26
NUM_ROWS = 100_000
ROW_WISE = "row-wise"
NO_COPIES = "planned, no copies"
SCHEDULE = Schedule(rounds=5, steps_per_round=20, warmup_steps=4)
QUICK_SCHEDULE = Schedule(2, 10, 2)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is trained: hosts of one rank each, a width, and what may be copied by which policy."""

    hosts: int
    dim: int
    policy: str
    extra: float

    def __str__(self) -> str:
        return f"{self.hosts} hosts, dim {self.dim}, policy {self.policy}"

    @property
    def contenders(self) -> dict[str, dict[str, Any]]:
        """By label: the policy of the plan, and how copies are summed.

        Row-wise placement has no plan.
        """
        ways = ("gather", "sparse") if self.policy == "safe" else ("gather", "sparse", "dense")
        copied = {f"{self.policy}, {way}": {"policy": self.policy, "replicas": way} for way in ways}
        return {ROW_WISE: {}, NO_COPIES: {"policy": "none"}, **copied}


SETTINGS = (Setting(2, 16, "safe", 0.05), Setting(4, 64, "everywhere", 0.01))


def run_copies(options: Options) -> tuple[list[Row], list[str]]:
    """Rows and notes of the section.

    Raises:
        PibrochError: where no lab can be built; says what is missing.
    """
    rows: list[Row] = []
    load = ForeignLoad()
    notes = list[str]()
    for setting in SETTINGS[:1] if options.quick else SETTINGS:
        lineup = Lineup.of(dict.fromkeys(setting.contenders, "tables_pibroch:build"), {})
        with Lab(setting.hosts) as lab, teams(lineup.specs, lab) as running:
            options.say(f"{setting}: setting up")
            for team in running:
                team.setup(case_of(setting, setting.contenders[team.spec.label], options))
                team.count_load(load)
            notes.append(f"{setting}: {check_agreement(running)}")
            options.say(str(setting))
            outcome = measure_at(RATE, lab, running, QUICK_SCHEDULE if options.quick else SCHEDULE)
        rows += [row_of(setting, outcome, label) for label in setting.contenders]
    return rows, [*notes, noise_note(load)]


def case_of(setting: Setting, contender: dict[str, Any], options: Options) -> Case:
    """The case of a contender, its plan written."""
    workload = Workload("zipf", 16, BATCH_SIZE * setting.hosts, NUM_TABLES, NUM_ROWS)
    data = workload.write(options.scratch)
    exchange = {"exchange": "alltoall"}
    if contender:
        plan = options.scratch / f"{setting.hosts}_{setting.dim}_{contender['policy']}"
        write_plan(plan, data, setting, contender["policy"])
        exchange |= {"plan": str(plan)} | (
            {"replicas": contender["replicas"]} if "replicas" in contender else {}
        )
    return Case(
        str(data),
        setting.dim,
        BATCH_SIZE,
        num_tables=NUM_TABLES,
        num_rows=NUM_ROWS,
        sparse_optimizer="rowwise_adagrad",
        threads=1,
        exchange_options=exchange,
    )


def write_plan(path: Path, data: Path, setting: Setting, policy: str) -> None:
    """Plan for the ids of all batches; each rank's part of one is a batch of its own."""
    if path.exists():
        return
    ids_NFB = Arrays.load(data).ids
    counts = {}
    batches = len(ids_NFB) * setting.hosts
    for table in range(ids_NFB.shape[1]):
        parts = ids_NFB[:, table].reshape(batches, BATCH_SIZE)
        read_in = sum(np.bincount(np.unique(part), minlength=NUM_ROWS) for part in parts)
        accesses = np.bincount(parts.ravel(), minlength=NUM_ROWS)
        counts[f"C{table}"] = TableCounts(accesses.astype(np.int64), np.asarray(read_in, np.int32))
    profile = AccessProfile(counts, batches * BATCH_SIZE, batches, BATCH_SIZE, "drawn")
    tables = [pb.Table(name, NUM_ROWS, setting.dim) for name in counts]
    options = PlanOptions(setting.extra, "training", policy, steps=False)  # type: ignore[arg-type]
    sizes = sizes_of(tables, pb.RowWiseAdagrad(lr=1.0))
    save_plan(
        path,
        *make_plan(sizes, profile, ClusterTopology.uniform(setting.hosts), options),
        tables,
        profile,
    )


def row_of(setting: Setting, outcome: Outcome, label: str) -> Row:
    """One contender's times and bytes."""
    times = outcome.times[label]
    to_row_wise = ratios(outcome, label, ROW_WISE)
    return {
        "hosts": setting.hosts,
        "dim": setting.dim,
        "contender": label,
        **{f"p{p}_ms": times.percentile(p) for p in (20, 50, 80)},
        "cpu_ms_per_step": sum(times.cpu_ms) / len(times.cpu_ms),
        "of_row_wise": middle(to_row_wise),
        "of_row_wise_least": min(to_row_wise),
        "of_row_wise_most": max(to_row_wise),
        "sent_mb_per_step": outcome.link_mb[label][0],
    }
