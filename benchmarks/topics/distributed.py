"""Training DLRM on several hosts.

Pibroch's ``alltoall``, TorchRec, and the ideal that no exchange can beat.

Hosts are those of the lab, a rank each; links are slow on purpose. The same model, starting
weights, batches and optimizers for all. The ideal is the dense model alone with its sums over
ranks, embeddings already there, in pibroch's and in plain torch's form. TorchRec runs with its
training pipeline; without it as well where there is time, and then the faster counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from benchmarks.agreement import Agreement, check_agreement
from benchmarks.cases import Case
from benchmarks.comparison import OURS, Lineup, noise_note
from benchmarks.hosts import (
    BATCH_SIZE,
    IDEAL,
    TORCHREC_FORMS,
    Outcome,
    comparison,
    figures,
    measure_at,
)
from benchmarks.hosts import case_of as hosts_case
from benchmarks.lab import Lab
from benchmarks.load import ForeignLoad
from benchmarks.plots import PlotSpec
from benchmarks.provenance import provenance
from benchmarks.registry import Options, topic
from benchmarks.results import Report, Row
from benchmarks.runner import Schedule
from benchmarks.team import Team, teams
from benchmarks.workloads import Workload, sample_path

IDEAL_FORMS = {
    IDEAL: "distributed_ideal_pibroch",
    "ideal, plain torch": "distributed_ideal:build_plain",
}
NUM_BATCHES = 16
SCHEDULE = Schedule(rounds=2, steps_per_round=10, warmup_steps=2)
COLUMNS = [
    "ids", "hosts", "dim", "rate", "contender", "p20_ms", "p50_ms", "p80_ms", "samples_per_second",
    "of_torchrec", "of_ideal", "sent_mb_per_step", "worst_link_mb_per_step", "peak_mb",
]  # fmt: skip
PLOT = PlotSpec(
    "p50_ms", ("ids", "hosts", "rate"), "dim", "contender", "ms a step", "p20_ms", "p80_ms"
)
MEANINGS = (
    (
        "TorchRec's planner places all tables table-wise, whatever bandwidth it is told; `TorchRec"
        " DMP` is without its training pipeline, run for comparison at 2 hosts with Zipf ids, as is"
        " the ideal in plain torch"
    ),
    (
        "DLRM 13-512-256-D / 512-256-1 with dot interaction, 26 tables of 100,000 rows, row-wise"
        " Adagrad; dense layers with SGD"
    ),
    (
        "batch 2048 a rank, one rank a host, one thread a rank; all hosts share this machine's"
        " cores, whoever runs"
    ),
    (
        "a step: forward, backward, dense and sparse update of a global batch; its time is the mean"
        " over the ranks"
    ),
    (
        "`of_torchrec`, `of_ideal`: step time over that of the faster form of TorchRec and of the"
        " ideal; median over the rounds"
    ),
    (
        "`sent_mb_per_step`: millions of bytes that a host's link sent, headers included, mean over"
        " the hosts; `worst_link_mb_per_step`: most that one link sent or received"
    ),
    "`peak_mb`: most resident memory of a rank's process since its set-up, the largest rank's",
)


@dataclass(frozen=True, slots=True)
class Setting:
    """One line-up's common ground; processes stay for all rates.

    Attributes:
        ids: kind of workload.
        hosts: a rank each.
        dim: of the tables.
        rates: of the links.
        all_forms: whether the slower forms of TorchRec and of the ideal run too.
    """

    ids: str
    hosts: int
    dim: int
    rates: tuple[str, ...] = ("1gbit", "200mbit")
    all_forms: bool = False

    def __str__(self) -> str:
        return f"{self.ids} ids, {self.hosts} hosts, dim {self.dim}"


def settings(quick: bool) -> list[Setting]:
    """What to measure; the real ids only where the sample is at hand."""
    if quick:
        return [Setting("zipf", 2, 16, ("200mbit",))]
    kinds = ["zipf", *(["criteo"] if sample_path() else [])]
    return [
        Setting(ids, hosts, dim, all_forms=(ids, hosts) == ("zipf", 2))
        for ids, hosts, dim in product(kinds, (2, 4), (16, 64))
    ]


@topic(
    "distributed",
    "DLRM training on several hosts with slow links, against TorchRec and the ideal; needs root",
)
def run(options: Options) -> Report:
    """Measure all settings.

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
        with Lab(setting.hosts) as lab, teams(lineup.specs, lab) as running:
            options.say(f"{setting}: setting up")
            for team in running:
                versions |= team.setup(case_of(setting, options))
                team.count_load(load)
            notes += [f"{setting}: {agreement}" for agreement in check(running)]
            for rate in setting.rates:
                options.say(f"{setting}, {rate}")
                outcome = measure_at(rate, lab, running, SCHEDULE)
                rows += case_rows(
                    setting, outcome, {team.spec.label: team.memory()["peak"] for team in running}
                )
                notes.append(headline(setting, outcome))
    notes += [noise_note(load), *MEANINGS]
    return Report(
        "distributed",
        "DLRM training on several hosts",
        rows,
        COLUMNS,
        PLOT,
        notes,
        provenance() | versions,
    )


def lineup_of(setting: Setting) -> Lineup:
    """Ours is followed by a slow one.

    What it fetched ahead is gone before somebody's steps are timed.
    """
    count = 2 if setting.all_forms else 1
    torchrec = dict(list(TORCHREC_FORMS.items())[:count])
    ideal = dict(list(IDEAL_FORMS.items())[:count])
    both = Lineup.of({OURS: "distributed_pibroch", **ideal}, torchrec)
    order = {label: place for place, label in enumerate((OURS, *torchrec, *ideal))}
    return Lineup(tuple(sorted(both.specs, key=lambda spec: order[spec.label])), both.notes)


def case_of(setting: Setting, options: Options) -> Case:
    """The case that all contenders build.

    ``data`` holds global batches, of which each rank takes its part.
    """
    workload = Workload(setting.ids, NUM_BATCHES, BATCH_SIZE * setting.hosts)
    return hosts_case(workload, setting.hosts, setting.dim, options)


def check(running: list[Team]) -> list[Agreement]:
    """Those who train embeddings must agree, and so must the ideals among themselves.

    Raises:
        BenchmarkError: when they do not.
    """
    ideals = [team for team in running if team.spec.label in IDEAL_FORMS]
    groups = ([team for team in running if team not in ideals], ideals)
    return [check_agreement(group) for group in groups if len(group) > 1]


def case_rows(setting: Setting, outcome: Outcome, peak_bytes: dict[str, int]) -> list[Row]:
    """One row a contender."""
    return [
        {
            "ids": setting.ids,
            "hosts": setting.hosts,
            "dim": setting.dim,
            "rate": outcome.rate,
            "contender": label,
            **figures(outcome, label, setting.hosts),
            "peak_mb": peak_bytes[label] / 1e6,
        }
        for label in outcome.times
    ]


def headline(setting: Setting, outcome: Outcome) -> str:
    """One line: pibroch against the faster form of TorchRec and against the ideal."""
    return f"**{setting}, {outcome.rate}: pibroch takes {comparison(outcome, OURS)}**"
