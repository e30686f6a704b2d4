"""Towers (DMT, MLSys'24).

Steps on hosts with slow links (Fig. 10 to 12), and what towers do to quality (Tables 3 to 6).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks import tower_quality
from benchmarks.agreement import check_agreement
from benchmarks.cases import Case
from benchmarks.comparison import Lineup, noise_note
from benchmarks.hosts import BATCH_SIZE, case_of, figures, measure_at, middle, ratios
from benchmarks.lab import Lab
from benchmarks.load import ForeignLoad
from benchmarks.plots import PlotSpec
from benchmarks.provenance import provenance
from benchmarks.registry import Options, topic
from benchmarks.results import Report, Row
from benchmarks.runner import Schedule
from benchmarks.team import Team, teams
from benchmarks.workloads import Workload

STEPS = "steps"
QUALITY = "quality"
GROUPS = "groups"
TITLES = {
    STEPS: "Steps on hosts with slow links (Fig. 10 to 12)",
    QUALITY: "Towers and compression against AUC, operations and parameters (Tables 3 to 5)",
    GROUPS: "Learned against strided groups (Table 6)",
}
BASELINE = "table_wise_pooled"
LOOKAHEAD = "lookahead"
PASS_THROUGH = "towers, pass-through"
WORKER = "towers_pibroch"
MOST_IDS = 8  # of a bag: 4.5 on average
DIM = 64
SCHEDULE = Schedule(rounds=3, steps_per_round=10, warmup_steps=2, pause_s=0.3)
PURPOSES = ("ids", "embeddings", "gradients")
COLUMNS = [
    "ids_per_bag",
    "hosts",
    "wire",
    "rate",
    "contender",
    "p20_ms",
    "p50_ms",
    "p80_ms",
    "speedup",
    "sent_mb_per_step",
    *(f"{purpose}_mb_per_step" for purpose in PURPOSES),
    "formula_mb",
]
PLOT = PlotSpec(
    "p50_ms",
    ("rate", "wire"),
    "setting",
    "contender",
    "ms a step",
    "p20_ms",
    "p80_ms",
    ours="towers, CR 2",
)
MEANINGS = (
    (
        f"DLRM 13-512-256-D / 512-256-1, 26 tables of 100,000 rows, D = {DIM}, Zipf ids, row-wise"
        f" Adagrad; {BATCH_SIZE} samples a rank, one rank and tower a host, one thread a rank; `CR"
        " n`: one projection D to D / n for the features of a tower"
    ),
    (
        f"baseline: `alltoall` with placement `{BASELINE}` on the same wire; `same model`: one on"
        " towers, under that"
    ),
    "`speedup`: the baseline's step time over this one's, median over the rounds",
    (
        "`sent_mb_per_step`: of a host's link, headers and dense gradients included; of them a"
        " rank's ids, embeddings and gradients; `formula_mb`: 2 b F (1 - 1/H) 4 D / CR"
    ),
)


@dataclass(frozen=True, slots=True)
class Setting:
    """One line-up's common ground.

    Attributes:
        most_ids: of a bag.
        hosts: a rank and a tower each.
        wire: of all.
        compressions: of the models on towers.
        rates: of the links.
        is_whole: whether the models on towers run under the baseline's exchange too, and lookahead
            beside all.
    """

    most_ids: int
    hosts: int
    wire: str = "float32"
    compressions: tuple[int, ...] = (2, 4)
    rates: tuple[str, ...] = ("200mbit",)
    is_whole: bool = True

    def __str__(self) -> str:
        return f"{(1 + self.most_ids) / 2:g} ids a bag, {self.hosts} hosts, {self.wire}"

    @property
    def entries(self) -> dict[str, dict[str, object]]:
        """Options of the case by label, the baseline first."""
        baseline: dict[str, object] = {
            "exchange": "alltoall",
            "placement": "table_wise_pooled",
            "wire": self.wire,
        }
        placed = baseline | {"exchange": "towers", "count": self.hosts}
        result = {BASELINE: baseline, PASS_THROUGH: placed}
        for compression in self.compressions:
            towers = {"towers": {"count": self.hosts, "width": DIM // compression}}
            result[f"towers, CR {compression}"] = placed | towers
            if self.is_whole:
                result[f"same model, CR {compression}"] = baseline | towers
        return result | (
            {LOOKAHEAD: {"exchange": "lookahead", "wire": self.wire}} if self.is_whole else {}
        )

    @property
    def lineups(self) -> list[list[str]]:
        """Labels of those that run at the same time, the baseline in each.

        All at once, their ranks take over 24 GiB.
        """
        if not self.is_whole:
            return [list(self.entries)]
        by_model = [
            [BASELINE, f"towers, CR {ratio}", f"same model, CR {ratio}"]
            for ratio in self.compressions
        ]
        return [[BASELINE, PASS_THROUGH, LOOKAHEAD], *by_model]


def settings(quick: bool) -> list[Setting]:
    """What to measure."""
    if quick:
        return [Setting(MOST_IDS, 2, compressions=(2,), is_whole=False)]
    return [
        Setting(MOST_IDS, 4, rates=("1gbit", "200mbit")),
        Setting(1, 4),
        Setting(MOST_IDS, 2),
        Setting(MOST_IDS, 4, "bfloat16", is_whole=False),
    ]


@topic(
    "towers",
    "towers on hosts with slow links, and what they do to quality (DMT); root for the section"
    " steps",
    sections=[STEPS, QUALITY, GROUPS],
    quick_sections=[STEPS],
)
def run(options: Options) -> Report:
    """Measure one section.

    Raises:
        PibrochError: where no lab can be built; says what is missing.
    """
    load = ForeignLoad()
    notes = [f"what: {TITLES[options.section]}"]
    rows = list[Row]()
    versions: dict[str, str] = {}
    if options.section != STEPS:
        make = tower_quality.quality if options.section == QUALITY else tower_quality.groups
        rows, message = make(options)
        notes += message
        columns = list(dict.fromkeys(name for row in rows for name in row))
        plot = tower_quality.PLOTS[options.section]
        return Report("towers", TITLES[options.section], rows, columns, plot, notes, provenance())
    for setting, labels in (
        (each, labels) for each in settings(options.quick) for labels in each.lineups
    ):
        options.say(f"{setting}: setting up {', '.join(labels)}")
        lineup = Lineup.of(dict.fromkeys(labels, WORKER), {})
        with Lab(setting.hosts) as lab, teams(lineup.specs, lab) as running:
            for team in running:
                team.count_load(load)
                versions |= team.setup(case_for(setting, team.spec.label, options))
            notes += [f"{setting}: {check_agreement(same)}" for same in alike(running)]
            for rate in setting.rates:
                options.say(f"{setting}, {rate}")
                result = measured(setting, rate, lab, running)
                notes += headlines(setting, result)
                rows += result if PASS_THROUGH in labels else result[1:]  # the baseline's row once
    return Report(
        "towers",
        TITLES[STEPS],
        rows,
        COLUMNS,
        PLOT,
        [*notes, noise_note(load), *MEANINGS],
        provenance() | versions,
    )


def case_for(setting: Setting, label: str, options: Options) -> Case:
    """The case of one contender."""
    num_batches = 4 if options.quick or setting.most_ids > 1 else 16
    workload = Workload("zipf", num_batches, BATCH_SIZE * setting.hosts * setting.most_ids)
    case = replace(case_of(workload, setting.hosts, DIM, options), batch_size=BATCH_SIZE)
    return replace(case, exchange_options=dict(setting.entries[label]), most_ids=setting.most_ids)


def alike(running: list[Team]) -> list[list[Team]]:
    """Contenders of one model, which must agree."""
    models: dict[str, list[Team]] = {}
    for team in running:
        label = team.spec.label
        models.setdefault(label.rpartition(", ")[2] if "CR" in label else "", []).append(team)
    return [same for same in models.values() if len(same) > 1]


def measured(setting: Setting, rate: str, lab: Lab, running: list[Team]) -> list[Row]:
    """One row a contender."""
    before = {team.spec.label: team.counts() for team in running}
    outcome = measure_at(rate, lab, running, SCHEDULE)
    rows = []
    for team in running:
        label = team.spec.label
        steps = sum(turn.steps for turn in team.carried)
        counted = {
            name: (value - before[label].get(name, 0)) / steps
            for name, value in team.counts().items()
        }
        compression = int(label.rpartition(" ")[2]) if "CR" in label else 1
        formula = 2 * BATCH_SIZE * 26 * (1 - 1 / setting.hosts) * 4 * DIM / compression / 1e6
        slower = [1 / ratio for ratio in ratios(outcome, label, BASELINE)]
        rows.append(
            {
                "setting": f"{(1 + setting.most_ids) / 2:g} ids, {setting.hosts} hosts",
                "ids_per_bag": (1 + setting.most_ids) / 2,
                "hosts": setting.hosts,
                "wire": setting.wire,
                "rate": rate,
                "contender": label,
                "speedup": middle(slower),
                "speedup_least": min(slower),
                "speedup_most": max(slower),
                **{
                    f"{purpose}_mb_per_step": counted.get(f"sent {purpose}", 0) / 1e6
                    for purpose in PURPOSES
                },
                "formula_mb": formula * (0.5 if setting.wire == "bfloat16" else 1)
                if label.startswith("towers")
                else None,
                **figures(outcome, label, setting.hosts),
            }
        )
    return rows


def headlines(setting: Setting, rows: list[Row]) -> list[str]:
    """A line for each contender but the baseline."""
    return [
        f"**{setting}, {row['rate']}: {row['contender']} {row['speedup']:.2f}x"
        f" ({row['speedup_least']:.2f} to "
        f"{row['speedup_most']:.2f}) as quick as {BASELINE}**"
        for row in rows
        if row["contender"] != BASELINE
    ]
