"""Tables of many widths beside tables of one, and sequences read id by id.

Against TorchRec's sharded collections.

One rank, and two on hosts of the lab. The dense part is a fixed head, so that the tables take the
time. TorchRec runs with its training pipeline and without; the faster counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.agreement import check_agreement
from benchmarks.cases import Case
from benchmarks.comparison import Lineup, noise_note
from benchmarks.hosts import Outcome, measure_at, middle, ratios
from benchmarks.lab import Lab
from benchmarks.load import ForeignLoad
from benchmarks.plots import PlotSpec
from benchmarks.provenance import provenance
from benchmarks.registry import Options, topic
from benchmarks.results import Report, Row
from benchmarks.runner import Schedule
from benchmarks.team import Team, teams
from benchmarks.workers.tables_heads import ONE_WIDTH
from benchmarks.workloads import Workload

RATE = "1gbit"
BATCH_SIZE = 2048
LENGTH = 200
TORCHREC = ("TorchRec pipelined", "TorchRec DMP")
ONE_WIDTH_LABEL = ", one width"
SCHEDULES = {
    "widths": Schedule(rounds=5, steps_per_round=10, warmup_steps=4),
    "sequences": Schedule(rounds=2, steps_per_round=10, warmup_steps=2),
}
QUICK_SCHEDULE = Schedule(rounds=2, steps_per_round=10, warmup_steps=2)
COLUMNS = [
    "what", "hosts", "contender", "p20_ms", "p50_ms", "p80_ms", "of_torchrec", "of_one_width",
    "sent_mb_per_step", "peak_mb",
]  # fmt: skip
PLOT = PlotSpec("p50_ms", ("what",), "hosts", "contender", "ms a step", "p20_ms", "p80_ms")
MEANINGS = (
    (
        "widths: 26 tables of 100,000 rows, dims 8 to 128, one id a bag, beside 26 of dim"
        f" {ONE_WIDTH}, as wide together"
    ),
    f"sequences: one table of 1,000,000 rows, dim 64, {LENGTH} ids a sample, a vector for each",
    (
        "row-wise Adagrad, batch 2048 a rank, Zipf ids; a fixed linear layer of 64 units behind the"
        " tables, nothing dense to train"
    ),
    (
        "one host: two threads; two hosts at 1 Gbit/s: a rank and a thread each, all hosts share"
        " this machine's cores"
    ),
    (
        "`of_torchrec`, `of_one_width`: step time over that of the faster form of TorchRec, and of"
        " the same exchange with one width; medians over the rounds"
    ),
)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is compared, on how many hosts."""

    what: str
    hosts: int

    def __str__(self) -> str:
        return f"{self.what}, {self.hosts} host{'s' if self.hosts > 1 else ''}"

    @property
    def exchanges(self) -> tuple[str, ...]:
        """Ours."""
        return ("local",) if self.hosts == 1 else ("alltoall", "lookahead")


SETTINGS = [Setting(what, hosts) for what in SCHEDULES for hosts in (1, 2)]


@topic(
    "tables",
    "tables of many widths, and sequences read id by id, against TorchRec's collections; needs"
    " root",
    sections=list(SCHEDULES),
    quick_sections=["widths"],
)
def run(options: Options) -> Report:
    """Measure a section.

    Raises:
        PibrochError: where no lab can be built; says what is missing.
    """
    load = ForeignLoad()
    notes = list[str]()
    rows: list[Row] = []
    versions: dict[str, str] = {}
    schedule = QUICK_SCHEDULE if options.quick else SCHEDULES[options.section]
    chosen = [setting for setting in SETTINGS if setting.what == options.section]
    for setting in chosen[:1] if options.quick else chosen:
        lineup = lineup_of(setting)
        notes += [note for note in lineup.notes if note not in notes]
        with Lab(setting.hosts) as lab, teams(lineup.specs, lab) as running:
            options.say(f"{setting}: setting up")
            for team in running:
                versions |= team.setup(case_of(setting, team.spec.label, options))
                team.count_load(load)
            agreements = [check_agreement(each) for each in alike(running)]
            options.say(str(setting))
            outcome = measure_at(RATE, lab, running, schedule)
            rows += case_rows(setting, outcome, running)
            notes += [headline(setting, outcome, exchange) for exchange in setting.exchanges]
            notes += [f"{setting}: {agreement}" for agreement in agreements]
    notes += [noise_note(load), *MEANINGS]
    return Report(
        "tables",
        "Tables of many widths, and sequences",
        rows,
        COLUMNS,
        PLOT,
        notes,
        provenance() | versions,
    )


def lineup_of(setting: Setting) -> Lineup:
    """Ours by each exchange, with many widths the same with one; TorchRec in both forms."""
    suffix = "_sequences" if setting.what == "sequences" else ""
    here = {}
    for exchange in setting.exchanges:
        here[label_of(exchange)] = f"tables_pibroch:build{suffix}"
        if setting.what == "widths":
            here[label_of(exchange) + ONE_WIDTH_LABEL] = "tables_pibroch:build"
    peers = {
        TORCHREC[0]: f"tables_torchrec:build{suffix}_pipelined",
        TORCHREC[1]: f"tables_torchrec:build{suffix}",
    }
    return Lineup.of(here, peers)


def label_of(exchange: str) -> str:
    """Of a contender of ours."""
    return f"pibroch, {exchange}"


def alike(running: list[Team]) -> list[list[Team]]:
    """Those that must agree: tables of one width among themselves, and all others."""
    one = [team for team in running if team.spec.label.endswith(ONE_WIDTH_LABEL)]
    return [each for each in ([team for team in running if team not in one], one) if each]


def case_of(setting: Setting, label: str, options: Options) -> Case:
    """The case of a contender."""
    is_sequence = setting.what == "sequences"
    is_one_width = label.endswith(ONE_WIDTH_LABEL)
    tables, num_rows = (LENGTH, 1_000_000) if is_sequence else (26, 100_000)
    workload = Workload("zipf", 8, BATCH_SIZE * setting.hosts, tables, num_rows)
    exchange = next((each for each in setting.exchanges if label.startswith(label_of(each))), "")
    return Case(
        str(workload.write(options.scratch)),
        64 if is_sequence else ONE_WIDTH if is_one_width else 0,
        BATCH_SIZE,
        num_tables=tables,
        num_rows=num_rows,
        sparse_optimizer="rowwise_adagrad",
        threads=2 // setting.hosts,
        exchange_options={"exchange": exchange},
    )


def case_rows(setting: Setting, outcome: Outcome, running: list[Team]) -> list[Row]:
    """One row a contender."""
    return [
        {
            "what": setting.what,
            "hosts": setting.hosts,
            "contender": team.spec.label,
            **{f"p{p}_ms": outcome.times[team.spec.label].percentile(p) for p in (20, 50, 80)},
            "of_torchrec": middle(ratios(outcome, team.spec.label, outcome.torchrec)),
            "of_one_width": middle(
                ratios(outcome, team.spec.label, team.spec.label + ONE_WIDTH_LABEL)
            ),
            "sent_mb_per_step": outcome.link_mb[team.spec.label][0],
            "peak_mb": team.memory()["peak"] / 1e6,
        }
        for team in running
    ]


def headline(setting: Setting, outcome: Outcome, exchange: str) -> str:
    """One line."""
    label = label_of(exchange)
    others = [
        (outcome.torchrec, f"TorchRec's ({outcome.torchrec})"),
        (label + ONE_WIDTH_LABEL, "one width's"),
    ]
    result = [(ratios(outcome, label, other), name) for other, name in others]
    parts = [
        f"{middle(each):.2f}x ({min(each):.2f} to {max(each):.2f}) {name}"
        for each, name in result
        if each
    ]
    return f"**{setting}, {exchange}: a step takes {' and '.join(parts) or 'what stands below'}**"
