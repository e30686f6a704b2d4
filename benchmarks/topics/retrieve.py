"""Rows read where they are (OPER, Fig. 6, 7 and 9a).

Lookups and training on hosts of two ranks, and what each part gains.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

from benchmarks.agreement import check_agreement
from benchmarks.cases import Arrays, Case
from benchmarks.comparison import OURS, Lineup, noise_note
from benchmarks.hosts import BATCH_SIZE, Outcome, measure_at, ratios
from benchmarks.lab import Lab
from benchmarks.load import ForeignLoad
from benchmarks.plots import PlotSpec
from benchmarks.provenance import provenance
from benchmarks.registry import Options, topic
from benchmarks.results import Report, Row
from benchmarks.retrieve_plans import split_in_time, write_plans
from benchmarks.runner import Schedule, measure
from benchmarks.team import Team, teams
from benchmarks.workloads import Workload, sample_path

RANKS_PER_HOST = 2
# of a rank, in all; of all ranks, at the end
NUM_BATCHES = 66
NUM_MEASURED = 4
ALLTOALL = "alltoall"
TORCHREC = "TorchRec"
STAYS = "rows stay"
LOOKUP = "lookup"
PARTS = "parts"
TABLES = "tables"
DLRM = "dlrm"
PLACES = "places"
MOVING = "moving"
SCHEDULE = Schedule(rounds=4, steps_per_round=12, warmup_steps=4)
QUICK = Schedule(rounds=2, steps_per_round=10, warmup_steps=2)
CONTENDERS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    LOOKUP: (
        {OURS: "retrieve_pibroch", ALLTOALL: "retrieve_pibroch:build_alltoall"},
        {TORCHREC: "retrieve_torchrec"},
    ),
    PARTS: (
        {
            OURS: "retrieve_pibroch",
            "placement, no copies": "retrieve_pibroch:build_placed",
            "one-sided reads alone": "retrieve_pibroch:build_shared",
            ALLTOALL: "retrieve_pibroch:build_alltoall",
        },
        {TORCHREC: "retrieve_torchrec"},
    ),
    TABLES: (
        {OURS: "retrieve_pibroch:train_retrieve", ALLTOALL: "retrieve_pibroch:train_alltoall"},
        {TORCHREC: "retrieve_torchrec:train"},
    ),
    DLRM: (
        {OURS: "retrieve_pibroch:train_retrieve", ALLTOALL: "retrieve_pibroch:train_alltoall"},
        {TORCHREC: "distributed_torchrec:build_pipelined"},
    ),
    MOVING: ({OURS: "retrieve_pibroch:train_moving", STAYS: "retrieve_pibroch:train_retrieve"}, {}),
}
COLUMNS = [
    "ids", "hosts", "rate", "contender", "p20_ms", "p50_ms", "p80_ms", "of_alltoall", "of_torchrec",
    "of_staying", "mb_per_host", "loopback_mb_per_host",
]  # fmt: skip
PLOT = PlotSpec("p50_ms", ("ids", "hosts"), "rate", "contender", "ms a step", "p20_ms", "p80_ms")
MEANINGS = {
    LOOKUP: (
        "lookups of 2048 samples a rank, 26 tables of 100,000 rows of dim 64; nothing is computed"
        " from them"
    ),
    PARTS: (
        "the same lookups, with one part of the design more from contender to contender (Fig. 9a)"
    ),
    TABLES: "lookups and updates by row-wise Adagrad, without dense layers",
    DLRM: "training DLRM 13-512-256-64 / 512-256-1 with dot interaction",
    MOVING: (
        "the same training while all rows move to another plan and back, again and again, in about"
        " 200 steps each way"
    ),
}


@dataclass(frozen=True, slots=True)
class Ground:
    """What the contenders of a line-up have in common.

    Attributes:
        ids: kind of workload.
        hosts: of two ranks each.
        rates: of the links.
    """

    ids: str
    hosts: int
    rates: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.ids} ids, {self.hosts} hosts"


def grounds(section: str, quick: bool) -> list[Ground]:
    """What a section measures; real ids where the sample is at hand."""
    ids = "criteo" if sample_path() else "zipf"
    if quick:
        return [Ground(ids, 2, ("200mbit",))]
    if section == MOVING:
        return [Ground(ids, number, ("1gbit",)) for number in (1, 2)]
    rates = ("1gbit", "200mbit")
    if section != LOOKUP:
        return [Ground(ids, number, rates) for number in ((1, 2) if section == TABLES else (2,))]
    return [Ground(ids, number, rates) for number in (1, 2, 4)] + [Ground("zipf", 2, rates)] * (
        ids != "zipf"
    )


@topic(
    "retrieve",
    "rows read where they are: lookups and training on hosts of two ranks, against TorchRec; needs"
    " root",
    sections=(LOOKUP, PARTS, TABLES, DLRM, PLACES, MOVING),
    quick_sections=(LOOKUP, PLACES),
)
def run(options: Options) -> Report:
    """Measure a section.

    Raises:
        PibrochError: where no lab can be built; says what is missing.
    """
    if options.section == PLACES:
        return places(options)
    section = options.section
    load = ForeignLoad()
    rows: list[Row] = []
    notes: list[str] = []
    versions: dict[str, str] = {}
    lineup = Lineup.of(*CONTENDERS[section])
    for ground in grounds(section, options.quick):
        case = replace(case_of(ground, options), model="none" if section == TABLES else "dlrm")
        with Lab(ground.hosts, RANKS_PER_HOST) as lab, teams(lineup.specs, lab) as running:
            options.say(f"{ground}: setting up")
            for team in running:
                versions |= team.setup(case)
                team.count_load(load)
            notes.append(f"{ground}: {check_agreement(running)}")
            for rate in ground.rates:
                options.say(f"{ground}, {rate}")
                outcome = measure_at(rate, lab, running, QUICK if options.quick else SCHEDULE)
                rows += [row_of(ground, outcome, label) for label in outcome.times]
                notes.append(headline(ground, outcome))
    notes += [*lineup.notes, noise_note(load), MEANINGS[section], *common_meanings()]
    title = f"Rows read where they are: {section}"
    return Report("retrieve", title, rows, COLUMNS, PLOT, notes, provenance() | versions)


def case_of(ground: Ground, options: Options) -> Case:
    """The last samples of a workload, and plans made from those before."""
    world_size = ground.hosts * RANKS_PER_HOST
    whole = Arrays.load(Workload(ground.ids, NUM_BATCHES, BATCH_SIZE).write(options.scratch))
    folder = options.scratch / f"{ground.ids}{ground.hosts}"
    folder.mkdir(exist_ok=True)
    earlier, measured = split_in_time(whole, world_size, NUM_MEASURED)
    measured.save(folder / "measured.npz")
    case = Case(
        str(folder / "measured.npz"), 64, BATCH_SIZE, sparse_optimizer="rowwise_adagrad", threads=1
    )
    plans = write_plans(earlier, case, ground.hosts, RANKS_PER_HOST, folder)
    return replace(case, exchange_options={"plans": plans})


def places(options: Options) -> Report:
    """One rank looks up while the others sleep.

    Own rows, a neighbour's, another host's, and half of each.
    """
    ground = Ground("uniform", 2, ("1gbit",))
    load = ForeignLoad()
    case = case_of(ground, options)
    lineup = Lineup.of({OURS: "retrieve_pibroch:build_one"}, {})
    schedule = QUICK if options.quick else Schedule(rounds=8, steps_per_round=20, warmup_steps=4)
    rows: list[Row] = []
    with Lab(ground.hosts, RANKS_PER_HOST) as lab, teams(lineup.specs, lab) as (team,):
        versions = team.setup(case)
        team.count_load(load)
        for rate in (None, "1gbit"):
            lab.network.shape(rate)
            rows += _places_at(team, rate or "none", schedule, lab.world_size)
    columns = [
        "rate",
        "rows",
        "p20_ms",
        "p50_ms",
        "p80_ms",
        "of_own",
        "of_longer_alone",
        "link_mb",
        "loopback_mb",
    ]
    plot = PlotSpec("p50_ms", ("rate",), "rows", "contender", "ms a lookup", "p20_ms", "p80_ms")
    notes = [
        noise_note(load),
        (
            "rank 0 of 2 x 2 looks up 6 tables (12 for `half`, with half the samples), the others"
            " are in no call of pibroch's"
        ),
        (
            "`of_own`: over own rows' time; `of_longer_alone`: time of `half` over the longer of"
            " half own and half far alone"
        ),
        (
            "`link_mb`, `loopback_mb`: millions of bytes on all hosts' links, and on their loopback"
            " interfaces, a lookup"
        ),
    ]
    return Report(
        "retrieve",
        "Rows read where they are: places",
        rows,
        columns,
        plot,
        notes,
        provenance() | versions,
    )


def _places_at(team: Team, rate: str, schedule: Schedule, world_size: int) -> list[Row]:
    rows: list[Row] = []
    for name in ("own", "neighbour", "far", "half"):
        team.carried.clear()
        times = measure([team], name, schedule)[OURS]
        steps = sum(turn.steps for turn in team.carried)
        megabytes = sum(link.sent for turn in team.carried for link in turn.links) / steps / 1e6
        near_mb = sum(map(sum, (turn.loopback for turn in team.carried))) / steps / 1e6
        percentiles = {
            f"p{p}_ms": world_size * times.percentile(p) for p in (20, 50, 80)
        }  # the others' times are none
        rows.append(
            {
                "contender": OURS,
                "rate": rate,
                "rows": name,
                **percentiles,
                "link_mb": megabytes,
                "loopback_mb": near_mb,
            }
        )
    own = rows[0]["p50_ms"]
    far = rows[2]["p50_ms"]
    for row in rows:
        row["of_own"] = row["p50_ms"] / own
    rows[-1]["of_longer_alone"] = rows[-1]["p50_ms"] / (max(own, far) / 2)
    return rows


def row_of(ground: Ground, outcome: Outcome, label: str) -> Row:
    """One contender's times, ratios and bytes."""
    own = outcome.times[label]
    return {
        "ids": ground.ids,
        "hosts": ground.hosts,
        "rate": outcome.rate,
        "contender": label,
        **{f"p{p}_ms": own.percentile(p) for p in (20, 50, 80)},
        "of_alltoall": _middle(outcome, label, ALLTOALL),
        "of_torchrec": _middle(outcome, label, TORCHREC),
        "of_staying": _middle(outcome, label, STAYS),
        "mb_per_host": outcome.link_mb[label][0],
        "loopback_mb_per_host": outcome.loopback_mb.get(label),
    }


def headline(ground: Ground, outcome: Outcome) -> str:
    """How many times as fast as the others, and bytes."""
    parts = [
        f"{1 / middle:.2f} times as fast as {other}"
        for other in (ALLTOALL, TORCHREC)
        if (middle := _middle(outcome, OURS, other)) is not None
    ]
    if (staying := _middle(outcome, OURS, STAYS)) is not None:
        parts.append(f"{staying:.2f} times as long a step while rows move")
    sent = outcome.link_mb[OURS][0]
    return (
        f"**{ground}, {outcome.rate}: {OURS} is {' and '.join(parts)}, {sent:.2f} MB a host and"
        " step**"
    )


def common_meanings() -> list[str]:
    """Of all sections."""
    return [
        f"{RANKS_PER_HOST} ranks a host, a thread each, all on this machine's cores;"
        " plans from the batches before those that "
        "are measured, with 5 % extra memory; contenders agree before they are measured",
        "`of_alltoall`, `of_torchrec`: step time over theirs, median over the rounds;"
        " `mb_per_host`: millions of bytes that a host's link sent a step, headers included,"
        " and `loopback_mb_per_host` those that its ranks sent each other by "
        "sockets; `TorchRec` is its planner's plan",
    ]


def _middle(outcome: Outcome, label: str, other: str) -> float | None:
    result = ratios(outcome, label, other)
    return median(result) if result else None
