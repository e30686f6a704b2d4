"""Who meets whom in topic ``lookahead``: the sections that are measured in the lab, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.comparison import Lineup
from benchmarks.hosts import IDEAL, TORCHREC_FORMS
from benchmarks.workloads import sample_path

LOOKAHEAD, ALLTOALL, TORCHREC = "lookahead", "alltoall", "TorchRec pipelined"
WORKERS = {
    LOOKAHEAD: "distributed_pibroch:build_lookahead",
    ALLTOALL: "distributed_pibroch",
    TORCHREC: TORCHREC_FORMS[TORCHREC],
    IDEAL: "distributed_ideal_pibroch",
}
LENGTH, SHORTER, QUICK_LENGTH = 200, 100, 20  # of the lookahead
BATCHES, SHORTER_BATCHES, QUICK_BATCHES, CRITEO_BATCHES = 256, 128, 40, 33
STEP_TIME, DESIGN, DELAY, TABLE_3, SKEW, MODELS = (
    "step time", "cache design", "delayed synchronisation", "lookahead", "skew", "other models",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """A contender of a line-up.

    Attributes:
        contender: one of ``WORKERS``.
        variant: what sets it apart from others of its kind.
        options: of the exchange.
        sections: where its rows belong, when not to the setting's section alone.
    """

    contender: str
    variant: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    sections: tuple[str, ...] = ()

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
    """One line-up's common ground, two hosts; the first entry is what the others are compared with.

    Attributes:
        section: where its rows belong.
        entries: who takes part, in turn.
        ids: kind of workload.
        dim: of the embeddings.
        rates: of the links.
        skew: exponent of Zipf ids.
        model: on the embeddings.
        num_batches: different global batches.
    """

    section: str
    entries: tuple[Entry, ...]
    ids: str = "zipf"
    dim: int = 16
    rates: tuple[str, ...] = ("200mbit",)
    skew: float = 1.05
    model: str = "dlrm"
    num_batches: int = BATCHES

    def __str__(self) -> str:
        ids = f"{self.ids} {self.skew:g} ids" if self.ids == "zipf" else f"{self.ids} ids"
        return f"{self.section}: {self.model}, {ids}, dim {self.dim}"


def ours(variant: str = "", sections: tuple[str, ...] = (), **options: Any) -> Entry:
    """An entry on the exchange ``lookahead``."""
    return Entry(LOOKAHEAD, variant, {"lookahead": LENGTH} | options, sections)


def settings(quick: bool) -> list[Setting]:
    """What to measure; the real ids only where the sample is at hand."""
    ideal, alltoall, torchrec = Entry(IDEAL), Entry(ALLTOALL), Entry(TORCHREC)
    if quick:
        return [
            Setting(STEP_TIME, (ours(lookahead=QUICK_LENGTH), torchrec, ideal, alltoall), num_batches=QUICK_BATCHES)
        ]
    everybody = (ours(), torchrec, ideal, alltoall)
    narrow = ours("bfloat16 wire", wire="bfloat16")
    found = [
        Setting(STEP_TIME, entries, dim=dim, rates=("1gbit", "200mbit"))
        for dim, entries in ((16, everybody), (64, (*everybody, narrow)))
    ]
    if sample_path():
        found.append(Setting(STEP_TIME, everybody, "criteo", 64, num_batches=CRITEO_BATCHES))
    designs = (
        ours("lrpp", (DESIGN, DELAY), cache="lrpp"),
        ours("partitioned", cache="partitioned"),
        ours("replicated", cache="replicated"),
        ours("replicated, not delayed", cache="replicated", delayed_sync=False),
        ours("not delayed", (DELAY,), delayed_sync=False),
    )
    found.append(Setting(DESIGN, designs))
    found.append(Setting(TABLE_3, tuple(ours(str(length), lookahead=length) for length in (200, 100, 50, 20, 5))))
    shorter = ours(lookahead=SHORTER)
    found += [
        Setting(SKEW, (shorter, ideal), rates=("1gbit",), skew=skew, num_batches=SHORTER_BATCHES)
        for skew in (0.0, 1.05, 1.5, 2.0, 5.0)
    ]
    found += [
        Setting(MODELS, (shorter, ideal, alltoall), model=model, num_batches=SHORTER_BATCHES)
        for model in ("dcnv2", "deepfm", "wide_deep")
    ]
    return found


def lineup_of(setting: Setting) -> Lineup:
    """The entries in their order; without TorchRec, and with a note, where it is not installed."""
    workers = {entry.label: WORKERS[entry.contender] for entry in setting.entries}
    peers = {label: worker for label, worker in workers.items() if label == TORCHREC}
    here = {label: worker for label, worker in workers.items() if label not in peers}
    found = Lineup.of(here, peers)
    order = list(workers)
    return Lineup(tuple(sorted(found.specs, key=lambda spec: order.index(spec.label))), found.notes)
