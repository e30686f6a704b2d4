"""Lookup and update alone: pibroch's kernels, FBGEMM's on the CPU, torch's operators.

Each contender looks the same ids up in 26 tables and applies the same gradient with the same
optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import torch

from benchmarks.cases import Case
from benchmarks.comparison import OURS, Lineup, Outcome, arena, noise_note
from benchmarks.load import ForeignLoad
from benchmarks.plots import PlotSpec
from benchmarks.provenance import provenance
from benchmarks.registry import Options, topic
from benchmarks.results import Report, Row
from benchmarks.runner import QUICK, Schedule
from benchmarks.workloads import Workload

FBGEMM = "FBGEMM TBE"
TORCH_FORMS = {
    "torch EmbeddingBag": "kernel_torch",
    "torch index_select": "kernel_torch:build_select",
}
PHASES = ("lookup", "lookup+update")
NUM_BATCHES = 24
COLUMNS = [
    "optimizer", "ids", "batch", "threads", "dim", "phase", "contender", "p20_ms", "p50_ms",
    "p80_ms", "cpu_ms", "over_pibroch",
]  # fmt: skip
PLOT = PlotSpec(
    "update_ms",
    ("optimizer", "ids", "batch", "threads"),
    "dim",
    "contender",
    "lookup + update, ms",
    "low",
    "high",
    1,
)
MEANINGS = (
    (
        "26 tables of 100,000 rows, one id a bag; `lookup+update` is forward and backward with the"
        " optimizer's step"
    ),
    "pibroch's times include its check of every id and the grouping of equal ones",
    "`cpu_ms`: CPU time of all threads a step, waiting in spin loops included",
    "`over_pibroch`: the contender's time over pibroch's, median over the rounds",
    "torch has no row-wise Adagrad for sparse gradients",
)


@dataclass(frozen=True, slots=True)
class Setting:
    """One line-up's common ground."""

    optimizer: str
    ids: str
    batch: int
    threads: int
    dim: int

    def __str__(self) -> str:
        return (
            f"{self.optimizer}, {self.ids} ids, batch {self.batch}, threads {self.threads}, dim"
            f" {self.dim}"
        )


def settings(quick: bool) -> list[Setting]:
    """What to measure: row-wise Adagrad, as production uses it, at all batch sizes.

    The others are measured at one.
    """
    cores = torch.get_num_threads()
    if quick:
        return [
            Setting(name, "zipf", 2048, cores, dim)
            for name in ("rowwise_adagrad", "adagrad")
            for dim in (64, 128)
        ]
    threads = sorted({1, cores})
    grid = product(("zipf", "uniform"), (2048, 4096), threads, (16, 64, 128))
    shapes = [Setting("rowwise_adagrad", *shape) for shape in grid]
    small = [shape for shape in shapes if shape.batch == 2048]
    return shapes + [
        replace(shape, optimizer=name) for name in ("adagrad", "sgd") for shape in small
    ]


@topic(
    "kernels",
    "lookup and update alone, against FBGEMM's CPU operator and torch's EmbeddingBag and"
    " index_select",
)
def run(options: Options) -> Report:
    """Measure all settings."""
    torch_forms = dict(list(TORCH_FORMS.items())[:1]) if options.quick else TORCH_FORMS
    lineup = Lineup.of({OURS: "kernel_pibroch", **torch_forms}, {FBGEMM: "kernel_fbgemm"})
    schedule = QUICK if options.quick else Schedule(rounds=4)
    load = ForeignLoad()
    notes = list(lineup.notes)
    rows: list[Row] = []
    with arena(lineup.specs, load) as contenders:
        for setting in settings(options.quick):
            options.say(str(setting))
            without = frozenset(torch_forms if setting.optimizer == "rowwise_adagrad" else ())
            outcome = contenders.compare(case_of(setting, options), PHASES, schedule, without)
            rows += case_rows(setting, outcome)
            notes += [f"{setting}: {outcome.agreement}"]
        versions = contenders.versions
    notes = [*headlines(rows), *notes, noise_note(load), *MEANINGS]
    return Report(
        "kernels",
        "Embedding lookup and update on CPU",
        rows,
        COLUMNS,
        PLOT,
        notes,
        provenance() | versions,
    )


def case_of(setting: Setting, options: Options) -> Case:
    """The case that all contenders build."""
    workload = Workload(setting.ids, NUM_BATCHES, setting.batch)
    return Case(
        str(workload.write(options.scratch)),
        setting.dim,
        batch_size=setting.batch,
        sparse_optimizer=setting.optimizer,
        threads=setting.threads,
    )


def case_rows(setting: Setting, outcome: Outcome) -> list[Row]:
    """One row a phase and contender; ``update_ms`` repeats the whole phase's time for the plot."""
    rows = []
    for phase, times in outcome.times.items():
        for label, own in times.items():
            ratios = sorted(own.ratios_to(times[OURS]))
            rows.append(
                {
                    "optimizer": setting.optimizer,
                    "ids": setting.ids,
                    "batch": setting.batch,
                    "threads": setting.threads,
                    "dim": setting.dim,
                    "phase": phase,
                    "contender": label,
                    "p20_ms": own.percentile(20),
                    "p50_ms": own.percentile(50),
                    "p80_ms": own.percentile(80),
                    "cpu_ms": sum(own.cpu_ms) / len(own.cpu_ms),
                    "over_pibroch": ratios[len(ratios) // 2],
                    "over_pibroch_least": ratios[0],
                    "over_pibroch_most": ratios[-1],
                    "update_ms": own.percentile(50) if phase == PHASES[1] else None,
                    "low": own.percentile(20),
                    "high": own.percentile(80),
                }
            )
    return rows


def headlines(rows: list[Row]) -> list[str]:
    """The fastest ``lookup+update`` of pibroch beside FBGEMM's.

    Each with the number of threads that suits it best.
    """
    best: dict[tuple[str, str, int, int], dict[str, Row]] = {}
    for row in rows:
        if row["phase"] == PHASES[1]:
            members = best.setdefault((row["optimizer"], row["ids"], row["batch"], row["dim"]), {})
            if row["p50_ms"] <= members.get(row["contender"], row)["p50_ms"]:
                members[row["contender"]] = row
    return [
        f"**{optimizer}, {ids} ids, batch {batch}, dim {dim}: pibroch {_best(members[OURS])},"
        f" FBGEMM {_best(members[FBGEMM])}:"
        f" {members[FBGEMM]['p50_ms'] / members[OURS]['p50_ms']:.2f}x**"
        for (optimizer, ids, batch, dim), members in best.items()
        if FBGEMM in members
    ]


def _best(row: Row) -> str:
    return f"{row['p50_ms']:.1f} ms (threads {row['threads']})"
