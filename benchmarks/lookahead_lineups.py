"""Who meets whom in topic ``lookahead``: what is measured in the lab, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.comparison import Lineup
from benchmarks.hosts import BATCH_SIZE, IDEAL, TORCHREC_FORMS
from benchmarks.lookahead_sections import (
    ASSIGNED,
    BATCH,
    BREAKDOWN,
    DELAY,
    DESIGN,
    HOSTS,
    LOSS,
    MODELS,
    SKEW,
    STEP_TIME,
    TABLE_3,
    WIRE,
    Section,
)
from benchmarks.workloads import sample_path

LOOKAHEAD = "lookahead"
ALLTOALL = "alltoall"
TORCHREC = "TorchRec pipelined"
WORKERS = {
    LOOKAHEAD: "distributed_pibroch:build_lookahead",
    ALLTOALL: "distributed_pibroch",
    TORCHREC: TORCHREC_FORMS[TORCHREC],
    IDEAL: "distributed_ideal_pibroch",
}
# of the lookahead
LENGTH = 200
SHORTER = 100
SHORTEST = 20
BATCHES = 256
SHORTER_BATCHES = 128
SHORTEST_BATCHES = 40
CRITEO_BATCHES = 33
LENGTHS = (300, 200, 100, 50, 10, 5)
LONGEST_BATCHES = 320
LOSS_BATCH = 512
LOSS_BATCHES = 128


@dataclass(frozen=True, slots=True)
class Entry:
    """A contender of a line-up.

    Attributes:
        contender: one of ``WORKERS``.
        variant: what sets it apart from others of its kind.
        options: of the exchange.
    """

    contender: str
    variant: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The contender's name within its line-up."""
        return f"{self.contender}, {self.variant}" if self.variant else self.contender

    @property
    def lookahead(self) -> int:
        """Steps that it looks ahead, 0 for one that does not."""
        return int(self.options["lookahead"]) if self.contender == LOOKAHEAD else 0


@dataclass(frozen=True, slots=True)
class Setting:
    """One line-up's common ground; the first entry is what the others are compared with.

    Attributes:
        section: where its rows belong.
        entries: who takes part, in turn.
        ids: kind of workload.
        dim: of the embeddings.
        rates: of the links.
        skew: of the ids, see :class:`benchmarks.workloads.Workload`.
        model: on the embeddings.
        num_batches: different global batches.
        hosts: a rank each.
        batch_size: of a rank.
        rounds: turns of each contender.
    """

    section: Section
    entries: tuple[Entry, ...]
    ids: str = "zipf"
    dim: int = 16
    rates: tuple[str, ...] = ("200mbit",)
    skew: float = 1.05
    model: str = "dlrm"
    num_batches: int = BATCHES
    hosts: int = 2
    batch_size: int = BATCH_SIZE
    rounds: int = 3

    def __str__(self) -> str:
        skew = {"zipf": f" {self.skew:g}", "hot": f" {self.skew:.0%}"}.get(self.ids, "")
        ranks = (
            f", {self.hosts} hosts, batch {self.batch_size}"
            if self.section in (ASSIGNED, HOSTS, BATCH, LOSS)
            else ""
        )
        return f"{self.model}, {self.ids}{skew} ids, dim {self.dim}{ranks}"


def ours(variant: str = "", **options: Any) -> Entry:
    """An entry on the exchange ``lookahead``."""
    return Entry(LOOKAHEAD, variant, {"lookahead": LENGTH} | options)


def settings(section: Section, quick: bool) -> list[Setting]:
    """What to measure of a section; quick: one shortened setting of it."""
    lineup = LINEUPS[section.name]()
    return [shortened(lineup[0])] if quick else lineup


def shortened(setting: Setting) -> Setting:
    """The setting at its last rate, with a short lookahead."""
    entries = tuple(entry for entry in map(shortened_entry, setting.entries) if entry is not None)
    num_batches = min(setting.num_batches, SHORTEST_BATCHES)
    return replace(
        setting, entries=entries, rates=setting.rates[-1:], num_batches=num_batches, rounds=2
    )


def shortened_entry(entry: Entry) -> Entry | None:
    """The entry with a short lookahead; ``None`` for one that is about a longer one."""
    if entry.lookahead <= SHORTEST:
        return entry
    is_about_length = entry.variant == str(entry.lookahead)
    return (
        None if is_about_length else replace(entry, options=entry.options | {"lookahead": SHORTEST})
    )


def everybody(lookahead: int) -> tuple[Entry, ...]:
    """The four that are compared.

    Ours is followed by a slow one, in whose turn it ends what it does beside its steps.
    """
    return ours(lookahead=lookahead), Entry(TORCHREC), Entry(IDEAL), Entry(ALLTOALL)


def step_time() -> list[Setting]:
    """The real ids only where the sample is at hand."""
    compressed = ours("compressed", compress=True)
    results = [
        Setting(STEP_TIME, entries, dim=dim, rates=("1gbit", "200mbit"))
        for dim, entries in ((16, everybody(LENGTH)), (64, (*everybody(LENGTH), compressed)))
    ]
    if sample_path():
        results.append(
            Setting(STEP_TIME, everybody(LENGTH), "criteo", 64, num_batches=CRITEO_BATCHES)
        )
    return results


def other_models() -> list[Setting]:
    """Contenders at one rate; rows are 16 wide, the first-order weight included.

    FBGEMM takes multiples of four alone.
    """
    return [
        Setting(MODELS, everybody(SHORTER), dim=dim, model=model, num_batches=SHORTER_BATCHES)
        for model, dim in (("dcnv2", 16), ("deepfm", 15), ("wide_deep", 15))
    ]


def time_breakdown() -> list[Setting]:
    """Where the network is slow, and where it carries much."""
    return [
        Setting(
            BREAKDOWN, everybody(SHORTEST), dim=dim, rates=(rate,), num_batches=SHORTEST_BATCHES
        )
        for dim, rate in ((16, "200mbit"), (64, "1gbit"))
    ]


def cache_design() -> list[Setting]:
    """The paper's three, and its replicated one, whose replicas all agree before the next step."""
    designs = tuple(ours(design, cache=design) for design in ("lrpp", "partitioned", "replicated"))
    more = (
        ours("replicated, not delayed", cache="replicated", delayed_sync=False),
        ours("lrpp, compressed", compress=True),
    )
    return [Setting(DESIGN, (*designs, *more))]


def delayed_synchronisation() -> list[Setting]:
    """With it, and without."""
    return [Setting(DELAY, (ours("delayed"), ours("not delayed", delayed_sync=False)))]


def wire() -> list[Setting]:
    """The same numbers in fewer bytes, and fewer digits."""
    both = {"wire": "bfloat16", "compress": True}
    entries = (
        ours(lookahead=SHORTER),
        ours("compressed", lookahead=SHORTER, compress=True),
        ours("bfloat16", lookahead=SHORTER, wire="bfloat16"),
        ours("bfloat16, compressed", lookahead=SHORTER, **both),
        Entry(IDEAL),
        Entry(ALLTOALL),
        Entry(ALLTOALL, "compressed", {"compress": True}),
        Entry(ALLTOALL, "bfloat16, compressed", both),
    )
    return [Setting(WIRE, entries, dim=64, rates=("1gbit", "200mbit"), num_batches=SHORTER_BATCHES)]


def hosts() -> list[Setting]:
    """As many samples a rank, on more ranks."""
    return [
        Setting(
            HOSTS,
            everybody(SHORTEST),
            hosts=hosts,
            batch_size=1024,
            num_batches=SHORTEST_BATCHES,
            rounds=2,
        )
        for hosts in (2, 4)
    ]


def batch_size() -> list[Setting]:
    """More samples a rank, on as many ranks."""
    return [
        Setting(BATCH, everybody(SHORTEST), batch_size=size, num_batches=SHORTEST_BATCHES, rounds=2)
        for size in (512, 2048, 8192)
    ]


def lookahead() -> list[Setting]:
    """All lengths in one line-up."""
    return [
        Setting(
            TABLE_3,
            tuple(ours(str(length), lookahead=length) for length in LENGTHS),
            num_batches=LONGEST_BATCHES,
        )
    ]


def assigned() -> list[Setting]:
    """On two hosts where bytes decide, and where they do not; then on four."""
    (_, *others) = everybody(LENGTH)
    entries = (ours(assign="given"), ours("assigned", assign="rows"), *others)
    slow = Setting(ASSIGNED, entries, dim=64)
    if sample_path():
        slow = replace(slow, ids="criteo", num_batches=CRITEO_BATCHES)
    return [
        slow,
        replace(slow, dim=16, rates=("1gbit",)),
        replace(slow, hosts=4, batch_size=1024),
    ]


def skew() -> list[Setting]:
    """Skews of the ids: 1 % of the rows get from 1 % of the lookups, as all do, to 90 %.

    Then exponents of Zipf's law.
    """
    degrees = [("hot", share) for share in (0.01, 0.4, 0.9)] + [
        ("zipf", power) for power in (1.05, 1.5, 2.0, 3.0, 5.0)
    ]
    return [
        Setting(
            SKEW,
            (ours(lookahead=SHORTER), Entry(IDEAL)),
            ids,
            rates=("1gbit",),
            skew=degree,
            num_batches=SHORTER_BATCHES,
        )
        for ids, degree in degrees
    ]


def loss() -> list[Setting]:
    """The sample where it is at hand; random labels fall as well, for rows learn them by heart."""
    ids = "criteo" if sample_path() else "zipf"
    pair = (ours(lookahead=SHORTER), Entry(ALLTOALL))
    return [Setting(LOSS, pair, ids, num_batches=LOSS_BATCHES, batch_size=LOSS_BATCH)]


LINEUPS: dict[str, Callable[[], list[Setting]]] = {
    STEP_TIME.name: step_time,
    MODELS.name: other_models,
    BREAKDOWN.name: time_breakdown,
    DESIGN.name: cache_design,
    DELAY.name: delayed_synchronisation,
    WIRE.name: wire,
    HOSTS.name: hosts,
    BATCH.name: batch_size,
    TABLE_3.name: lookahead,
    SKEW.name: skew,
    LOSS.name: loss,
    ASSIGNED.name: assigned,
}


def lineup_of(setting: Setting) -> Lineup:
    """The entries in their order; without TorchRec, and with a note, where it is not installed."""
    workers = {entry.label: WORKERS[entry.contender] for entry in setting.entries}
    peers = {label: worker for label, worker in workers.items() if label == TORCHREC}
    here = {label: worker for label, worker in workers.items() if label not in peers}
    lineup = Lineup.of(here, peers)
    order = list(workers)
    return Lineup(
        tuple(sorted(lineup.specs, key=lambda spec: order.index(spec.label))), lineup.notes
    )
