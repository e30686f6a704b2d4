"""The exchange ``lookahead`` on hosts with slow links, and its oracle alone.

In the terms of the paper (BagPipe, SOSP'23).

A section is measured and written for itself: ``benchmarks.lookahead_sections`` says which there
are, ``lookahead_lineups`` who takes part.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from benchmarks import oracle_speed
from benchmarks.agreement import Agreement, check_agreement
from benchmarks.breakdown import StackedPlot, beyond_ideal, breakdown_rows
from benchmarks.cases import Case
from benchmarks.comparison import noise_note
from benchmarks.hosts import (
    IDEAL,
    Outcome,
    case_of,
    comparison,
    figures,
    measure_at,
    middle,
    ratios,
)
from benchmarks.lab import Lab
from benchmarks.load import ForeignLoad
from benchmarks.lookahead_lineups import ALLTOALL, LOOKAHEAD, Entry, Setting, lineup_of, settings
from benchmarks.lookahead_sections import (
    ASSIGNED,
    BATCH,
    BREAKDOWN,
    DESIGN,
    HOSTS,
    LOSS,
    ORACLE,
    SECTIONS,
    SKEW,
    STEP_TIME,
    TABLE_3,
    Section,
)
from benchmarks.loss_curves import (
    STEPS_PER_TURN,
    CurvePlot,
    check_equal,
    curve_rows,
    train_in_turns,
)
from benchmarks.plots import Plot, PlotSpec
from benchmarks.provenance import provenance
from benchmarks.registry import Options, topic
from benchmarks.results import Report, Row
from benchmarks.runner import Schedule
from benchmarks.team import Team, teams
from benchmarks.workloads import Workload
from pibroch.exchange.lookahead.window import MORE_AHEAD_A_STEP
from pibroch.models.build import MODELS

SCHEDULE = Schedule(rounds=3, steps_per_round=10, warmup_steps=2, pause_s=0.3)
LOSS_TURNS = 24
QUICK_TURNS = 3
PURPOSES = ("critical", "deferred", "prefetch", "evict", "ids")
COLUMNS = [
    "model",
    "ids",
    "skew",
    "dim",
    "hosts",
    "batch",
    "features",
    "rate",
    "contender",
    "variant",
    "lookahead",
    "part",
    "step",
    "seconds",
    "loss",
    "last_loss",
    "equal_losses",
    "p20_ms",
    "p50_ms",
    "p80_ms",
    "mean_ms",
    "share",
    "samples_per_second",
    "ns_per_id",
    "of_lookahead",
    "of_torchrec",
    "of_ideal",
    "sent_mb_per_step",
    *(f"{purpose}_mb_per_step" for purpose in PURPOSES),
    "slots",
    "cache_mb",
    "read_rows",
    "fetched_rows",
    "prefetched_rows",
    "peak_mb",
]
BARS = PlotSpec(
    "height", ("panel",), "group", "contender", "", "low", "high", 1, LOOKAHEAD, shared=False
)
PLOTS: dict[Section, Plot] = {BREAKDOWN: StackedPlot(), LOSS: CurvePlot()}
MEANINGS = {
    "model": (
        "each host has one rank with one thread; 2048 samples a rank where no other batch is named,"
        " 26 tables of 100,000 rows, row-wise Adagrad, dense layers with SGD; `dlrm`: 13-512-256-D"
        " / 512-256-1 with dot interaction; other models: networks of 512-256; a step: forward,"
        " backward, dense and sparse update of a global batch; its time is the mean over the ranks"
    ),
    "skew": (
        "`skew`: exponent of Zipf ids, none is 0; of `hot` ids the share of lookups that read 1 %"
        " of the rows"
    ),
    "of_lookahead": (
        "`of_lookahead`, `of_torchrec`, `of_ideal`: step time over that of the line-up's first"
        " contender, of TorchRec, of the ideal; median over the rounds"
    ),
    "share": (
        "`share`: of the mean step; `mean_ms`: what the plot shows, for means sum up to the mean"
        " step"
    ),
    "loss": (
        "`loss`: mean of the last ten steps' losses of the global batch, `last_loss` that of the"
        " last one; `equal_losses`: those that are the first contender's to the bit; `seconds`: of"
        " all steps so far"
    ),
    "sent_mb_per_step": (
        "`sent_mb_per_step`: millions of bytes that a host's link sent, headers included, dense"
        " gradients as well; `critical_mb_per_step` and the like: of them, what a rank sent by"
        " purpose; `ids` are those of future batches"
    ),
    "slots": (
        "`slots`: records whose home is elsewhere that a rank keeps at the end, `cache_mb` their"
        " bytes in millions; `read_rows`: different rows that a rank reads a step, `fetched_rows`:"
        " those that came from other ranks for it; `prefetched_rows`: of them the ones that came"
        " early, from their bytes as if all were records"
    ),
}


@dataclass(slots=True)
class Findings:
    """What a section's line-ups gave."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)


@topic(
    "lookahead",
    "training with lookahead on hosts with slow links, and its oracle alone; needs root",
    sections=list(SECTIONS),
    quick_sections=[STEP_TIME.name, ORACLE.name],
)
def run(options: Options) -> Report:
    """Measure one section.

    Raises:
        PibrochError: where no lab can be built; says what is missing.
    """
    section = SECTIONS[options.section]
    load = ForeignLoad()
    findings = Findings()
    if section == ORACLE:
        with oracle_speed.on_one_core():
            for oracle_setting in oracle_speed.settings(options.quick):
                options.say(str(oracle_setting))
                findings.rows += oracle_speed.rows_of(
                    oracle_setting, oracle_speed.speed(oracle_setting)
                )
    else:
        for group in groups(settings(section, options.quick)):
            measure_group(group, options, load, findings)
    columns = [name for name in COLUMNS if any(row.get(name) is not None for row in findings.rows)]
    meanings = [text for name, text in MEANINGS.items() if name in columns]
    shortened = (
        ["quick: one setting, at most 20 steps looked ahead, two rounds, 30 losses"]
        if options.quick
        else []
    )
    notes = [
        f"how: {section.how}",
        *shortened,
        *summary(section, findings.rows),
        *findings.notes,
        noise_note(load),
        *meanings,
    ]
    origin = provenance() | findings.versions
    return Report(
        "lookahead", section.title, findings.rows, columns, PLOTS.get(section, BARS), notes, origin
    )


def groups(result: list[Setting]) -> list[list[Setting]]:
    """Settings that the same processes measure one after the other.

    Those of other sections start afresh, for their memory.
    """
    return [result] if result[0].section == BATCH else [[setting] for setting in result]


def measure_group(
    group: list[Setting], options: Options, load: ForeignLoad, findings: Findings
) -> None:
    """Start a line-up and measure its settings."""
    lineup = lineup_of(group[0])
    findings.notes += [note for note in lineup.notes if note not in findings.notes]
    with Lab(group[0].hosts) as lab, teams(lineup.specs, lab) as running:
        for setting in group:
            options.say(f"{setting}: setting up")
            lab.network.shape(None)
            for team in running:
                team.count_load(load)
                findings.versions |= team.setup(case_for(entry_of(setting, team), setting, options))
            measure_setting(setting, lab, running, options, findings)


def measure_setting(
    setting: Setting, lab: Lab, running: list[Team], options: Options, findings: Findings
) -> None:
    """Let contenders agree, then measure them at each rate."""
    if setting.section == LOSS:
        measure_losses(setting, lab, running, options, findings)
        return
    findings.notes += [f"{setting}: {agreement}" for agreement in check(running)]
    warm_up(setting, running)
    for rate in setting.rates:
        options.say(f"{setting}, {rate}")
        before = {team.spec.label: team.counts() for team in running}
        outcome = measure_at(rate, lab, running, replace(SCHEDULE, rounds=setting.rounds))
        for team in running:
            entry = entry_of(setting, team)
            counted = figures_of_exchange(before[team.spec.label], team, setting)
            if setting.section == BREAKDOWN:
                findings.rows += breakdown_rows(
                    basis(setting, entry, rate), outcome.times[entry.label]
                )
            else:
                findings.rows.append(case_row(setting, entry, outcome, counted))
        findings.notes += [headline(setting, outcome)] if IDEAL in outcome.times else []


def measure_losses(
    setting: Setting, lab: Lab, running: list[Team], options: Options, findings: Findings
) -> None:
    """From the first step on: there is nothing to agree on beforehand, and nothing to warm up."""
    (rate,) = setting.rates
    lab.network.shape(rate)
    turns = QUICK_TURNS if options.quick else LOSS_TURNS
    curves = train_in_turns(running, turns, options.say)
    check_equal(curves)
    findings.notes.append(
        f"**all {turns * STEPS_PER_TURN} losses of {' and '.join(curves)} are equal to the bit**"
    )
    findings.rows += curve_rows(
        {entry.label: basis(setting, entry, rate) for entry in setting.entries}, curves
    )


def entry_of(setting: Setting, team: Team) -> Entry:
    """Whom a team stands for."""
    return next(entry for entry in setting.entries if entry.label == team.spec.label)


def case_for(entry: Entry, setting: Setting, options: Options) -> Case:
    """The case of one entry: all have the same but for the options of the exchange."""
    workload = Workload(
        setting.ids, setting.num_batches, setting.batch_size * setting.hosts, skew=setting.skew
    )
    case = case_of(workload, setting.hosts, MODELS[setting.model].table_dim(setting.dim), options)
    reports_parts = setting.section in (BREAKDOWN, LOSS)
    return replace(
        case, model=setting.model, exchange_options=entry.options, reports_parts=reports_parts
    )


def check(running: list[Team]) -> list[Agreement]:
    """Those who train embeddings must agree, where there are several.

    Raises:
        BenchmarkError: when they do not.
    """
    trained = [team for team in running if team.spec.label != IDEAL]
    return [check_agreement(trained)] if len(trained) > 1 else []


def warm_up(setting: Setting, running: list[Team]) -> None:
    """Fill the caches, and let feeds come to read as far ahead as they will.

    The first takes as many steps as are looked ahead, or all batches once. A feed reads two batches
    further with each step: until then a step reads, announces and assigns three batches, not one.
    """
    for team in running:
        lookahead = entry_of(setting, team).lookahead
        steps = max(min(lookahead, setting.num_batches), -(-lookahead // MORE_AHEAD_A_STEP))
        if steps:
            team.run("step", 0, steps)
            team.pause(SCHEDULE.pause_s)


def figures_of_exchange(before: dict[str, float], team: Team, setting: Setting) -> Row:
    """What the exchange counted in the steps since ``before``.

    Memory alone for one that counts nothing.
    """
    after = team.counts()
    steps = sum(turn.steps for turn in team.carried)
    row: Row = {"peak_mb": team.memory()["peak"] / 1e6}
    if not after:
        return row
    a_step = {name: (value - before.get(name, 0)) / steps for name, value in after.items()}
    record_bytes = 4 * (
        MODELS[setting.model].table_dim(setting.dim) + 1
    )  # row-wise Adagrad has one number of state
    return (
        row
        | {f"{purpose}_mb_per_step": a_step.get(f"sent {purpose}", 0) / 1e6 for purpose in PURPOSES}
        | {"prefetched_rows": round(a_step.get("sent prefetch", 0) / record_bytes)}
        | {f"{name}_rows": round(a_step[f"rows {name}"]) for name in ("read", "fetched")}
        | {"slots": round(after["slots"]), "cache_mb": after["slots"] * record_bytes / 1e6}
    )


def basis(setting: Setting, entry: Entry, rate: str) -> Row:
    """What a row says of its setting and contender."""
    is_scaled = setting.section in (ASSIGNED, HOSTS, BATCH, LOSS)
    return {
        "model": setting.model,
        "ids": setting.ids,
        "skew": setting.skew if setting.ids in ("zipf", "hot") else None,
        "dim": setting.dim,
        "hosts": setting.hosts if is_scaled else None,
        "batch": setting.batch_size if is_scaled else None,
        "rate": rate,
        "contender": entry.contender,
        "variant": entry.variant or None,
        "lookahead": entry.lookahead or None,
        "panel": f"{setting.model}, dim {setting.dim}, {rate}"
        if setting.section == BREAKDOWN
        else f"{rate}: ms a step",
    }


def case_row(setting: Setting, entry: Entry, outcome: Outcome, counted: Row) -> Row:
    """The row of an entry at one rate."""
    measured = figures(outcome, entry.label, setting.hosts, setting.batch_size) | counted
    first = middle(ratios(outcome, entry.label, setting.entries[0].label))
    drawn = {
        "group": group_of(setting, entry),
        "height": measured["p50_ms"],
        "low": measured["p20_ms"],
        "high": measured["p80_ms"],
    }
    return basis(setting, entry, outcome.rate) | measured | {"of_lookahead": first} | drawn


def group_of(setting: Setting, entry: Entry) -> str:
    """Where a row stands on its panel's axis."""
    if entry.variant and setting.section != ASSIGNED:
        return entry.variant
    skew = f"Zipf {setting.skew:g}" if setting.ids == "zipf" else f"1 %: {setting.skew:.0%}"
    names = {
        STEP_TIME: f"{setting.ids}, dim {setting.dim}",
        SKEW: skew,
        HOSTS: f"{setting.hosts} hosts",
        BATCH: f"batch {setting.batch_size}",
        ASSIGNED: f"{setting.hosts} hosts, dim {setting.dim}",
    }
    return names.get(setting.section, setting.model)


def headline(setting: Setting, outcome: Outcome) -> str:
    """One line: lookahead against TorchRec, the ideal and ``alltoall``, where they ran."""
    sentence = comparison(outcome, LOOKAHEAD)
    alltoall = middle(ratios(outcome, LOOKAHEAD, ALLTOALL))
    to_alltoall = "" if alltoall is None else f", {alltoall:.2f}x alltoall's"
    return f"**{setting}, {outcome.rate}: lookahead takes {sentence}{to_alltoall}**"


def summary(section: Section, rows: list[Row]) -> list[str]:
    """What a section as a whole shows."""
    ours = [row for row in rows if row["contender"] not in (IDEAL, ALLTOALL)]
    if section == DESIGN:
        designs = {row["variant"]: row["critical_mb_per_step"] for row in ours}
        whole = designs.pop(
            "replicated, not delayed"
        )  # the paper's: all replicas agree before the next step
        less = ", ".join(
            f"{1 - critical / whole:.0%} ({name})" for name, critical in designs.items()
        )
        return [
            "**bytes on the critical path below those of a replicated cache without delay:"
            f" {less}**"
        ]
    if section in (TABLE_3, SKEW):
        times = [row["p50_ms"] for row in ours]
        return [
            f"**the slowest step of lookahead takes {max(times) / min(times):.2f}x the quickest**"
        ]
    if section == ORACLE:
        speeds = [row["samples_per_second"] for row in ours if row["features"] == 26]
        return [
            f"**{min(speeds) / 1e6:.2f} to {max(speeds) / 1e6:.2f} million samples/s with 26"
            " features**"
        ]
    if section == ASSIGNED:
        return [
            f"**{row['hosts']} hosts, dim {row['dim']}, {row['rate']}: assigned takes"
            f" {row['of_lookahead']:.2f}x the step of samples as given, {row['of_ideal']:.2f}x the"
            " ideal's**"
            for row in ours
            if row["variant"]
        ]
    return beyond_ideal(rows) if section == BREAKDOWN else []
