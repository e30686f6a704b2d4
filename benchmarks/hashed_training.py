"""Training over tables of raw ids beside the same over fixed tables: topic ``hashed``."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean, median

from benchmarks.agreement import check_agreement
from benchmarks.cases import CHECK_STEPS, Arrays, Case
from benchmarks.comparison import Lineup, arena, noise_note
from benchmarks.hosts import BATCH_SIZE as HOST_BATCH_SIZE
from benchmarks.hosts import Outcome, figures, joined, measure_at
from benchmarks.hosts import case_of as hosts_case
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
from pibroch.kernels.arrays import Ints

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
NUM_BATCHES = 100
WARMUP_STEPS = 20
STEPS_PER_ROUND = 15
FIRST_STEP = CHECK_STEPS + WARMUP_STEPS + 1
LAST_STEP = FIRST_STEP + 2 * STEPS_PER_ROUND
TEAMS = 3  # one after the other: the same processes started again differ by 5 %
NEW_IDS = "some new"  # batches that were not read before
OLD_IDS = "all old"  # those batches again
STEP_COLUMNS = ["what", "dim", "contender", "p20_ms", "p50_ms", "p80_ms", "of_fixed"]
STEP_PLOT = PlotSpec("p50_ms", ("what",), "dim", "contender", "ms a step", "p20_ms", "p80_ms")
HOST_COLUMNS = [
    "exchange", "ids", "dim", "contender", "p20_ms", "p50_ms", "p80_ms", "of_fixed",
    "sent_mb_per_step",
]  # fmt: skip
HOST_PLOT = replace(STEP_PLOT, panel_by=("exchange", "ids"))
MEANINGS = (
    (
        "DLRM 13-512-256-D / 512-256-1 with dot interaction, 26 tables of 100,000 rows, batch 2048"
        " a rank; Zipf ids, stored batches in turn"
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
    workload = Workload("zipf", NUM_BATCHES, HOST_BATCH_SIZE * 2)
    notes: list[str] = []
    for exchange, workers in HOSTS.items():
        for dim in (16,) if options.quick else (16, 64):
            case = hosts_case(workload, 2, dim, options)
            if exchange == "lookahead":
                case = replace(case, exchange_options={"lookahead": LOOKAHEAD})
            measured: list[dict[str, Outcome]] = []
            for number in range(1 if options.quick else TEAMS):
                options.say(f"{exchange}, dim {dim}: teams {number + 1}")
                measured.append(_new_and_old(case, workers, load))
            for ids in (NEW_IDS, OLD_IDS):
                outcome = joined([each[ids] for each in measured])
                rows += [
                    {
                        "exchange": exchange,
                        "ids": ids,
                        "dim": dim,
                        "contender": label,
                        **figures(outcome, label, 2),
                        "of_fixed": _over_fixed(outcome.times, label),
                    }
                    for label in workers
                ]
                each_team = ", ".join(
                    f"{_over_fixed(part[ids].times, HASHED):.2f}" for part in measured
                )
                notes.append(
                    f"**{exchange}, dim {dim}, ids {ids}: {_over_fixed(outcome.times, HASHED):.3f}"
                    f" of fixed tables' time** ({each_team} of each pair of teams)"
                )
    share = _share_of_new(Arrays.load(case.data).ids)
    notes += [
        noise_note(load),
        *MEANINGS,
        f"ids {NEW_IDS!r}: steps {FIRST_STEP} to {LAST_STEP}, in which {share:.0%} of the distinct"
        f" ids of a global batch stand for the first time; {OLD_IDS!r}: after all stored batches",
    ]
    title = "Training over tables of raw ids on two hosts, 1 Gbit/s"
    return Report("hashed", title, rows, HOST_COLUMNS, HOST_PLOT, notes, provenance())


def _new_and_old(case: Case, workers: dict[str, str], load: ForeignLoad) -> dict[str, Outcome]:
    """What fresh processes give, by which ids they read."""
    with Lab(2) as lab, teams(Lineup.of(workers, {}).specs, lab) as running:
        for team in running:
            team.setup(case)
            team.count_load(load)
        check_agreement(running)
        return {
            ids: measure_at("1gbit", lab, running, Schedule(2, STEPS_PER_ROUND, warmup_steps))
            for ids, warmup_steps in ((NEW_IDS, WARMUP_STEPS), (OLD_IDS, NUM_BATCHES - LAST_STEP))
        }


def _share_of_new(ids: Ints) -> float:
    """Of the distinct ids of each measured batch ``[steps, tables, samples]``, never seen before.

    Mean over the steps.
    """
    shares = []
    seen = [set[int]() for _ in range(ids.shape[1])]
    for number, batch in enumerate(ids):
        distinct = [set(of_table.tolist()) for of_table in batch]
        new = [here - before for here, before in zip(distinct, seen, strict=True)]
        if FIRST_STEP <= number <= LAST_STEP:
            shares.append(sum(map(len, new)) / sum(map(len, distinct)))
        for before, here in zip(seen, new, strict=True):
            before |= here
    return mean(shares)


def _over_fixed(times: dict[str, Times], label: str) -> float:
    return median(times[label].ratios_to(times[FIXED]))
