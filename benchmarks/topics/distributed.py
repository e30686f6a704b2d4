"""Training DLRM on several hosts: pibroch's ``alltoall``, TorchRec, and the ideal that no exchange can beat.

Hosts are those of the lab, a rank each; links are slow on purpose. The same model, starting weights, batches and optimizers
for all. The ideal is the dense model alone with its sums over ranks, embeddings already there, in pibroch's and in plain
torch's form. TorchRec runs with its training pipeline; without it as well where there is time, and then the faster counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median

import numpy as np

from benchmarks.agreement import Agreement, check_agreement
from benchmarks.cases import Case
from benchmarks.comparison import OURS, Lineup, noise_note
from benchmarks.lab import Lab
from benchmarks.load import ForeignLoad
from benchmarks.plots import PlotSpec
from benchmarks.provenance import provenance
from benchmarks.registry import Options, topic
from benchmarks.results import Report, Row
from benchmarks.runner import Schedule, Times, measure
from benchmarks.team import Carried, Team, teams
from benchmarks.workloads import Workload, sample_path

TORCHREC_FORMS = {
    "TorchRec pipelined": "distributed_torchrec:build_pipelined",
    "TorchRec DMP": "distributed_torchrec",
}
IDEAL = "ideal"
IDEAL_FORMS = {IDEAL: "distributed_ideal_pibroch", "ideal, plain torch": "distributed_ideal:build_plain"}
BATCH_SIZE, NUM_BATCHES = 2048, 16
SCHEDULE = Schedule(rounds=2, steps_per_round=10, warmup_steps=2)
COLUMNS = [
    "ids", "hosts", "dim", "rate", "contender", "p20_ms", "p50_ms", "p80_ms", "samples_per_second", "of_torchrec",
    "of_ideal", "sent_mb_per_step", "worst_link_mb_per_step", "peak_mb",
]  # fmt: skip
PLOT = PlotSpec("p50_ms", ("ids", "hosts", "rate"), "dim", "contender", "ms a step", "p20_ms", "p80_ms")
MEANINGS = (
    "TorchRec's planner places all tables table-wise, whatever bandwidth it is told; `TorchRec DMP` is without its training "
    "pipeline, run for comparison at 2 hosts with Zipf ids, as is the ideal in plain torch",
    "DLRM 13-512-256-D / 512-256-1 with dot interaction, 26 tables of 100,000 rows, row-wise Adagrad; dense layers with SGD",
    "batch 2048 a rank, one rank a host, one thread a rank; all hosts share this machine's cores, whoever runs",
    "a step: forward, backward, dense and sparse update of a global batch; its time is the mean over the ranks",
    "`of_torchrec`, `of_ideal`: step time over that of the faster form of TorchRec and of the ideal; median over the rounds",
    "`sent_mb_per_step`: millions of bytes that a host's link sent, headers included, mean over the hosts; "
    "`worst_link_mb_per_step`: most that one link sent or received",
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


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one line-up gave at one rate: times and bytes by contender."""

    rate: str
    times: dict[str, Times]
    link_mb: dict[str, tuple[float, float]]

    @property
    def torchrec(self) -> str | None:
        """The faster form of TorchRec."""
        forms = [label for label in self.times if label in TORCHREC_FORMS]
        return min(forms, key=lambda label: self.times[label].percentile(50), default=None)


def settings(quick: bool) -> list[Setting]:
    """What to measure; the real ids only where the sample is at hand."""
    if quick:
        return [Setting("zipf", 2, 16, ("200mbit",))]
    kinds = ["zipf", *(["criteo"] if sample_path() else [])]
    return [
        Setting(ids, hosts, dim, all_forms=(ids, hosts) == ("zipf", 2))
        for ids, hosts, dim in product(kinds, (2, 4), (16, 64))
    ]


@topic("distributed", "DLRM training on several hosts with slow links, against TorchRec and the ideal; needs root")
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
                rows += case_rows(setting, outcome, {team.spec.label: team.memory()["peak"] for team in running})
                notes.append(headline(setting, outcome))
    notes += [noise_note(load), *MEANINGS]
    return Report("distributed", "DLRM training on several hosts", rows, COLUMNS, PLOT, notes, provenance() | versions)


def lineup_of(setting: Setting) -> Lineup:
    """Ours is followed by a slow one: what it fetched ahead is gone before somebody's steps are timed."""
    count = 2 if setting.all_forms else 1
    torchrec, ideal = dict(list(TORCHREC_FORMS.items())[:count]), dict(list(IDEAL_FORMS.items())[:count])
    both = Lineup.of({OURS: "distributed_pibroch", **ideal}, torchrec)
    order = {label: place for place, label in enumerate((OURS, *torchrec, *ideal))}
    return Lineup(tuple(sorted(both.specs, key=lambda spec: order[spec.label])), both.notes)


def case_of(setting: Setting, options: Options) -> Case:
    """The case that all contenders build; ``data`` holds global batches, of which each rank takes its part."""
    workload = Workload(setting.ids, NUM_BATCHES, BATCH_SIZE * setting.hosts)
    path = workload.write(options.scratch)
    return Case(str(path), setting.dim, batch_size=BATCH_SIZE, sparse_optimizer="rowwise_adagrad", threads=1)


def check(running: list[Team]) -> list[Agreement]:
    """Those who train embeddings must agree, and so must the ideals among themselves.

    Raises:
        BenchmarkError: when they do not.
    """
    ideals = [team for team in running if team.spec.label in IDEAL_FORMS]
    groups = ([team for team in running if team not in ideals], ideals)
    return [check_agreement(group) for group in groups if len(group) > 1]


def measure_at(rate: str, lab: Lab, running: list[Team], schedule: Schedule) -> Outcome:
    """Time all contenders in turn with links of one rate."""
    lab.network.shape(rate)
    for team in running:
        team.carried.clear()
    times = measure(running, "step", schedule)
    return Outcome(rate, times, {team.spec.label: link_mb(team.carried) for team in running})


def link_mb(carried: Sequence[Carried]) -> tuple[float, float]:
    """Megabytes a step: sent on the mean link, and sent or received on the link that carried most."""
    steps = sum(turn.steps for turn in carried)
    bytes_per_link = np.array([[(link.sent, link.received) for link in turn.links] for turn in carried]).sum(0)
    return float(bytes_per_link[:, 0].mean() / steps / 1e6), float(bytes_per_link.max() / steps / 1e6)


def case_rows(setting: Setting, outcome: Outcome, peak_bytes: dict[str, int]) -> list[Row]:
    """One row a contender."""
    rows = []
    for label, mine in outcome.times.items():
        p50_ms, (sent_mb, worst_link_mb) = mine.percentile(50), outcome.link_mb[label]
        to_torchrec = ratios(outcome, label, outcome.torchrec)
        rows.append({
            "ids": setting.ids, "hosts": setting.hosts, "dim": setting.dim, "rate": outcome.rate, "contender": label,
            "p20_ms": mine.percentile(20), "p50_ms": p50_ms, "p80_ms": mine.percentile(80),
            "cpu_ms_per_step": sum(mine.cpu_ms) / len(mine.cpu_ms),
            "samples_per_second": setting.hosts * BATCH_SIZE / p50_ms * 1e3,
            "of_torchrec": middle(to_torchrec),
            "of_torchrec_least": min(to_torchrec, default=None), "of_torchrec_most": max(to_torchrec, default=None),
            "of_ideal": middle(ratios(outcome, label, IDEAL)),
            "sent_mb_per_step": sent_mb, "worst_link_mb_per_step": worst_link_mb, "peak_mb": peak_bytes[label] / 1e6,
        })  # fmt: skip
    return rows


def headline(setting: Setting, outcome: Outcome) -> str:
    """One line: pibroch against the faster form of TorchRec and against the ideal."""
    parts = []
    for other, name in ((outcome.torchrec, f"TorchRec's step time ({outcome.torchrec})"), (IDEAL, "the ideal's")):
        found = ratios(outcome, OURS, other)
        if found:
            parts.append(f"{middle(found):.2f}x ({min(found):.2f} to {max(found):.2f}) {name}")
    return f"**{setting}, {outcome.rate}: pibroch takes {' and '.join(parts)}**"


def ratios(outcome: Outcome, label: str, other: str | None) -> list[float]:
    """Step time over that of another contender, round by round; empty when it did not run."""
    if other not in outcome.times:
        return []
    return outcome.times[label].ratios_to(outcome.times[other])


def middle(values: list[float]) -> float | None:
    """The median, ``None`` of nothing."""
    return median(values) if values else None
