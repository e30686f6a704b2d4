"""Training over tables of raw ids beside the same over fixed tables: topic ``hashed``."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from benchmarks.agreement import check_agreement
from benchmarks.comparison import Lineup, arena, noise_note
from benchmarks.hosts import BATCH_SIZE as HOST_BATCH_SIZE
from benchmarks.hosts import case_of as hosts_case
from benchmarks.hosts import figures, measure_at
from benchmarks.lab import Lab
from benchmarks.load import ForeignLoad
from benchmarks.plots import PlotSpec
from benchmarks.provenance import provenance
from benchmarks.registry import Options
from benchmarks.results import Report, Row
from benchmarks.runner import Schedule, Times
from benchmarks.team import teams
from benchmarks.topics.single_process import Setting, case_of
from benchmarks.workloads import Workload

FIXED = "fixed"
HASHED = "hashed"
STEP = {FIXED: "dlrm_pibroch", HASHED: "dlrm_pibroch:build_hashed"}
ROWS = {FIXED: "dlrm_pibroch:build_rows", HASHED: "dlrm_pibroch:build_hashed_rows"}
HOSTS = {
    "alltoall": {FIXED: "distributed_pibroch", HASHED: "distributed_pibroch:build_hashed"},
    "lookahead": {
        FIXED: "distributed_pibroch:build_lookahead",
        HASHED: "distributed_pibroch:build_lookahead_hashed",
    },
}
LOOKAHEAD = 40
NUM_BATCHES = 60
STEP_COLUMNS = ["what", "dim", "contender", "p20_ms", "p50_ms", "p80_ms", "of_fixed"]
STEP_PLOT = PlotSpec("p50_ms", ("what",), "dim", "contender", "ms a step", "p20_ms", "p80_ms")
HOST_COLUMNS = [
    "exchange", "dim", "contender", "p20_ms", "p50_ms", "p80_ms", "of_fixed", "sent_mb_per_step",
]  # fmt: skip
HOST_PLOT = replace(STEP_PLOT, panel_by=("exchange",))
MEANINGS = (
    (
        "DLRM 13-512-256-D / 512-256-1 with dot interaction, 26 tables of 100,000 rows, batch 2048"
        " a rank; Zipf ids, stored batches in turn, so that hardly any id is new after the warm-up"
    ),
    "`of_fixed`: step time over that of fixed tables, of medians, median over the rounds",
    "`rows alone`: lookups and updates without a model",
)


def step_report(options: Options) -> Report:
    """One process: a whole step, and its lookups and updates alone."""
    load = ForeignLoad()
    rows: list[Row] = []
    notes: list[str] = []
    schedule = Schedule(rounds=3 if options.quick else 7, steps_per_round=20, warmup_steps=40)
    for what, workers in (("step", STEP), ("rows alone", ROWS)):
        for dim in (16, 64):
            options.say(f"{what}, dim {dim}")
            case = case_of(Setting("zipf", "adagrad", dim), options)
            with arena(Lineup.of(workers, {}).specs, load) as contenders:
                # ids without rows read zeros before they are trained: the checks before are unlike
                outcome = contenders.compare(
                    case, ("step",), schedule, frozenset(), unlike=frozenset({HASHED})
                )
            times = outcome.times["step"]
            rows += [
                {
                    "what": what,
                    "dim": dim,
                    "contender": label,
                    "p20_ms": times[label].percentile(20),
                    "p50_ms": times[label].percentile(50),
                    "p80_ms": times[label].percentile(80),
                    "of_fixed": _over_fixed(times, label),
                }
                for label in workers
            ]
            notes.append(
                f"**{what}, dim {dim}: {_over_fixed(times, HASHED):.3f} of fixed tables' time**"
            )
    notes += [noise_note(load), *MEANINGS]
    title = "Training over tables of raw ids in one process"
    return Report("hashed", title, rows, STEP_COLUMNS, STEP_PLOT, notes, provenance())


def hosts_report(options: Options) -> Report:
    """Two hosts of the lab, 1 Gbit/s."""
    load = ForeignLoad()
    rows: list[Row] = []
    notes: list[str] = []
    schedule = Schedule(rounds=2 if options.quick else 4, steps_per_round=15, warmup_steps=20)
    for exchange, workers in HOSTS.items():
        for dim in (16,) if options.quick else (16, 64):
            options.say(f"{exchange}, dim {dim}: setting up")
            workload = Workload("zipf", NUM_BATCHES, HOST_BATCH_SIZE * 2)
            case = hosts_case(workload, 2, dim, options)
            if exchange == "lookahead":
                case = replace(case, exchange_options={"lookahead": LOOKAHEAD})
            with Lab(2) as lab, teams(Lineup.of(workers, {}).specs, lab) as running:
                for team in running:
                    team.setup(case)
                    team.count_load(load)
                notes.append(f"{exchange}, dim {dim}: {check_agreement(running)}")
                outcome = measure_at("1gbit", lab, running, schedule)
            rows += [
                {
                    "exchange": exchange,
                    "dim": dim,
                    "contender": label,
                    **figures(outcome, label, 2),
                    "of_fixed": _over_fixed(outcome.times, label),
                }
                for label in workers
            ]
            ratio = _over_fixed(outcome.times, HASHED)
            notes.append(f"**{exchange}, dim {dim}: {ratio:.3f} of fixed tables' time**")
    notes += [noise_note(load), *MEANINGS]
    title = "Training over tables of raw ids on two hosts, 1 Gbit/s"
    return Report("hashed", title, rows, HOST_COLUMNS, HOST_PLOT, notes, provenance())


def _over_fixed(times: dict[str, Times], label: str) -> float:
    return median(times[label].ratios_to(times[FIXED]))
