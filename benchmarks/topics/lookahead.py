"""The exchange ``lookahead`` on two hosts with slow links, in the paper's terms (BagPipe, SOSP'23), and its oracle alone.

Step time (Fig. 9, 10, 15), cache designs (Fig. 7), delayed synchronisation (Fig. 8), length of the lookahead (Table 3), the
oracle (Fig. 17), skew (Fig. 18, 19), other models. Line-ups are in ``benchmarks.lookahead_lineups``.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks import oracle_speed
from benchmarks.agreement import Agreement, check_agreement
from benchmarks.cases import Case
from benchmarks.comparison import noise_note
from benchmarks.hosts import BATCH_SIZE, IDEAL, Outcome, case_of, comparison, figures, measure_at, middle, ratios
from benchmarks.lab import Lab
from benchmarks.load import ForeignLoad
from benchmarks.lookahead_lineups import (
    ALLTOALL,
    DESIGN,
    LOOKAHEAD,
    SKEW,
    STEP_TIME,
    TABLE_3,
    Entry,
    Setting,
    lineup_of,
    settings,
)
from benchmarks.plots import PlotSpec
from benchmarks.provenance import provenance
from benchmarks.registry import Options, topic
from benchmarks.results import Report, Row
from benchmarks.runner import Schedule
from benchmarks.team import Team, teams
from benchmarks.workloads import Workload
from pibroch.models.build import MODELS

HOSTS = 2
SCHEDULE = Schedule(rounds=3, steps_per_round=10, warmup_steps=2, pause_s=0.3)
QUICK = replace(SCHEDULE, rounds=2)
PURPOSES = ("critical", "deferred", "prefetch", "evict", "ids")
COLUMNS = [
    "section", "model", "ids", "skew", "dim", "rate", "contender", "variant", "batch", "features", "lookahead", "p20_ms",
    "p50_ms", "p80_ms", "samples_per_second", "ns_per_id", "of_lookahead", "of_torchrec", "of_ideal", "sent_mb_per_step",
    *(f"{purpose}_mb_per_step" for purpose in PURPOSES), "slots", "read_rows", "fetched_rows", "prefetched_rows", "peak_mb",
]  # fmt: skip
PLOT = PlotSpec("height", ("panel",), "group", "contender", "", "low", "high", 1, LOOKAHEAD, shared=False)
MEANINGS = (
    "two hosts, one rank each with one thread; batch 2048 a rank, 26 tables of 100,000 rows, row-wise Adagrad, dense layers "
    "with SGD; more different global batches with Zipf ids than are looked ahead, 33 of the Criteo sample, in turn",
    "`dlrm`: 13-512-256-D / 512-256-1 with dot interaction; other models: pibroch's, with networks of 512-256",
    "before a measurement as many steps are taken as are looked ahead, without a limit of the links",
    "a step: forward, backward, dense and sparse update of a global batch; its time is the mean over the ranks",
    "`of_lookahead`, `of_torchrec`, `of_ideal`: step time over that of the line-up's first contender, of TorchRec, of the "
    "ideal; median over the rounds",
    "`sent_mb_per_step`: millions of bytes that a host's link sent, headers included, dense gradients as well; "
    "`critical_mb_per_step` and the like: of them, what a rank sent by purpose; `ids` are those of future batches",
    "`slots`: records whose home is elsewhere that a rank keeps at the end; `read_rows`: different rows that a rank reads a "
    "step, `fetched_rows`: those that came from other ranks for it; `prefetched_rows`: of them the ones that came early, from "
    "their bytes as if all were records",
    "oracle: Zipf ids of a global batch, duplicates included, made addresses and added, and one step planned, of two ranks; in "
    "this process, on one core, while the window is full",
)


@topic("lookahead", "training with lookahead on two hosts with slow links, and its oracle alone; needs root")
def run(options: Options) -> Report:
    """Measure all sections.

    Raises:
        PibrochError: where no lab can be built; says what is missing.
    """
    load = ForeignLoad()
    rows: list[Row] = []
    notes: list[str] = []
    versions: dict[str, str] = {}
    for setting in settings(options.quick):
        lineup = lineup_of(setting)
        notes += [note for note in lineup.notes if note not in notes]
        with Lab(HOSTS) as lab, teams(lineup.specs, lab) as running:
            options.say(f"{setting}: setting up")
            for team in running:
                team.count_load(load)
                versions |= team.setup(case_for(entry_of(setting, team), setting, options))
            notes += [f"{setting}: {agreement}" for agreement in check(running)]
            warm_up(setting, running)
            for rate in setting.rates:
                options.say(f"{setting}, {rate}")
                before = {team.spec.label: team.counts() for team in running}
                outcome = measure_at(rate, lab, running, QUICK if options.quick else SCHEDULE)
                for team in running:
                    counted = figures_of_exchange(before[team.spec.label], team, setting)
                    rows += case_rows(setting, entry_of(setting, team), outcome, counted)
                notes += [headline(setting, outcome)] if IDEAL in outcome.times else []
    with oracle_speed.on_one_core():
        for oracle_setting in oracle_speed.settings(options.quick):
            options.say(str(oracle_setting))
            rows += oracle_speed.rows_of(oracle_setting, oracle_speed.speed(oracle_setting))
    notes = [*findings(rows), *notes, noise_note(load), *MEANINGS]
    title, origin = "Training with lookahead", provenance() | versions
    return Report("lookahead", title, rows, COLUMNS, PLOT, notes, origin, table_by="section")


def entry_of(setting: Setting, team: Team) -> Entry:
    """Whom a team stands for."""
    return next(entry for entry in setting.entries if entry.label == team.spec.label)


def case_for(entry: Entry, setting: Setting, options: Options) -> Case:
    """The case of one entry: all have the same but for the options of the exchange."""
    workload = Workload(setting.ids, setting.num_batches, BATCH_SIZE * HOSTS, skew=setting.skew)
    case = case_of(workload, HOSTS, MODELS[setting.model].table_dim(setting.dim), options)
    return replace(case, model=setting.model, exchange_options=entry.options)


def check(running: list[Team]) -> list[Agreement]:
    """Those who train embeddings must agree, where there are several.

    Raises:
        BenchmarkError: when they do not.
    """
    trained = [team for team in running if team.spec.label != IDEAL]
    return [check_agreement(trained)] if len(trained) > 1 else []


def warm_up(setting: Setting, running: list[Team]) -> None:
    """Fill the caches: as many steps as are looked ahead, or all batches once."""
    for team in running:
        steps = min(entry_of(setting, team).lookahead, setting.num_batches)
        if steps:
            team.run("step", 0, steps)
            team.pause(SCHEDULE.pause_s)


def figures_of_exchange(before: dict[str, float], team: Team, setting: Setting) -> Row:
    """What the exchange counted in the steps since ``before``; memory alone for one that counts nothing."""
    after, steps = team.counts(), sum(turn.steps for turn in team.carried)
    found: Row = {"peak_mb": team.memory()["peak"] / 1e6}
    if not after:
        return found
    a_step = {name: (value - before.get(name, 0)) / steps for name, value in after.items()}
    record_bytes = 4 * (MODELS[setting.model].table_dim(setting.dim) + 1)  # row-wise Adagrad has one number of state
    return (
        found
        | {f"{purpose}_mb_per_step": a_step.get(f"sent {purpose}", 0) / 1e6 for purpose in PURPOSES}
        | {"prefetched_rows": round(a_step.get("sent prefetch", 0) / record_bytes)}
        | {f"{name}_rows": round(a_step[f"rows {name}"]) for name in ("read", "fetched")}
        | {"slots": round(after["slots"])}
    )


def case_rows(setting: Setting, entry: Entry, outcome: Outcome, counted: Row) -> list[Row]:
    """One row of an entry for each section that it belongs to."""
    measured = figures(outcome, entry.label, HOSTS) | counted
    first = middle(ratios(outcome, entry.label, setting.entries[0].label))
    return [
        {
            "section": section, "model": setting.model, "ids": setting.ids,
            "skew": setting.skew if setting.ids == "zipf" else None, "dim": setting.dim, "rate": outcome.rate,
            "contender": entry.contender, "variant": entry.variant or None,
            "lookahead": entry.lookahead or None, **measured, "of_lookahead": first,
            "panel": f"{section} at {outcome.rate}: ms", "group": group_of(setting, entry),
            "height": measured["p50_ms"], "low": measured["p20_ms"], "high": measured["p80_ms"],
        }
        for section in entry.sections or (setting.section,)
    ]  # fmt: skip


def group_of(setting: Setting, entry: Entry) -> str:
    """Where a row stands on its panel's axis."""
    if entry.variant:
        return entry.variant
    names = {
        STEP_TIME: f"{setting.ids}, dim {setting.dim}",
        SKEW: f"Zipf {setting.skew:g}" if setting.skew else "uniform",
    }
    return names.get(setting.section, setting.model)


def headline(setting: Setting, outcome: Outcome) -> str:
    """One line: lookahead against TorchRec, the ideal and ``alltoall``, where they ran."""
    found = comparison(outcome, LOOKAHEAD)
    alltoall = middle(ratios(outcome, LOOKAHEAD, ALLTOALL))
    to_alltoall = "" if alltoall is None else f", {alltoall:.2f}x alltoall's"
    return f"**{setting}, {outcome.rate}: lookahead takes {found}{to_alltoall}**"


def findings(rows: list[Row]) -> list[str]:
    """What whole sections show; each only where it was measured."""
    sections: dict[str, list[Row]] = {}
    for row in rows:
        if row["contender"] not in (IDEAL, ALLTOALL):
            sections.setdefault(row["section"], []).append(row)
    lines = []
    if designs := {row["variant"]: row["critical_mb_per_step"] for row in sections.get(DESIGN, [])}:
        whole = designs["replicated, not delayed"]  # the paper's: all replicas agree before the next step
        less = ", ".join(f"{1 - designs[name] / whole:.0%} ({name})" for name in ("lrpp", "partitioned", "replicated"))
        lines.append(
            f"**{DESIGN}: bytes on the critical path below those of a replicated cache without delay: {less}**"
        )
    for section in (TABLE_3, SKEW):
        if members := sections.get(section):
            times = [row["p50_ms"] for row in members]
            lines.append(
                f"**{section}: the slowest step of lookahead takes {max(times) / min(times):.2f}x the quickest**"
            )
    speeds = [row["samples_per_second"] for row in sections.get("oracle", []) if row["features"] == 26]
    lines.append(f"**oracle: {min(speeds) / 1e6:.2f} to {max(speeds) / 1e6:.2f} million samples/s with 26 features**")
    return lines
