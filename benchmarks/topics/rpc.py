"""Remote calls with tensors: pibroch, torch.distributed.rpc and gRPC.

On one host and over a link of a lab.

Each contender is a pair of processes, a caller and its callee; all take turns. Settings follow the
paper (Sec. 4.1): a function that returns its argument and one of 200 pointwise operations, remote
references (Table 1), distributed autograd (Table 2).
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from benchmarks import rpc_ablation
from benchmarks.cases import Case
from benchmarks.comparison import OURS, Lineup, noise_note
from benchmarks.contender import ContenderSpec
from benchmarks.environments import our_python
from benchmarks.lab import Lab, obstacle
from benchmarks.load import ForeignLoad
from benchmarks.plots import PlotSpec
from benchmarks.provenance import provenance
from benchmarks.registry import Options, topic
from benchmarks.results import Report, Row
from benchmarks.rpc_pairs import Pair, pairs
from benchmarks.runner import Schedule, Times, measure
from benchmarks.workers.rpc_subject import CALLS_PER_STEP

TORCH = "torch"
TORCH_BASIC = "torch basic"
GRPC = "gRPC"
WORKERS = {
    OURS: "rpc_pibroch:build",
    TORCH: "rpc_torch:build",
    TORCH_BASIC: "rpc_torch:build_basic",
    GRPC: "rpc_grpc:build",
}
# kinds of phases
CALLS = ("identity", "plus_one", "ops", "send", "in_flight")
AUTOGRAD = ("norpc", "nograd", "grad")
WITH_REFERENCES = frozenset({OURS, TORCH})
EXAMPLES = {
    OURS: "rpc_identity_pibroch.py",
    TORCH: "rpc_identity_torch.py",
    GRPC: "rpc_identity_grpc.py",
}
ONE_HOST = "one host"
LINE_RATE = "1gbit"
LINE_BYTES_PER_S = 1e9 / 8
KB = 1000
MB = 1_000_000
LARGE = (4 * MB, 40 * MB, 400 * MB)
CHECKED_SIZES = 3  # up to 40 MB
IDLE_S = 3.0
CASE = Case(data="", dim=0, threads=0)  # a pair knows its phases by name
COLUMNS = [
    "where", "call", "size", "contender", "p20", "p50", "p80", "over_pibroch", "calls_per_second",
    "line_share", "cpu",
]  # fmt: skip
PLOT = PlotSpec(
    "over_pibroch",
    ("where", "kind"),
    "case",
    "contender",
    "times as long as pibroch",
    "over_least",
    "over_most",
    1,
)
MEANINGS = (
    (
        "a caller and a callee, one process each, stopped while it is another's turn; torch's"
        " default number of threads, which spin for 1000 rounds at most; the same argument in all"
        " calls of a size"
    ),
    (
        "`identity` returns its argument, `x + 1` a new tensor, `200 ops` one after 200 pointwise"
        " operations, `send` four bytes"
    ),
    (
        "`n in flight`: 1 KB identity calls, at most n of them waiting for their results; times are"
        " per call, by throughput"
    ),
    (
        "`rref`: the callee fetches the argument by a reference, then returns it; compare with"
        " `identity` (paper's Table 1)"
    ),
    (
        "`norpc`, `nograd`, `grad`: two layers 1000 x 1000, batch 128, the first at the callee;"
        " forward and backward as in Table 2"
    ),
    "`over_pibroch`: the contender's time over pibroch's, median over the rounds",
    (
        "`line_share`: payload sent both ways one after the other at 1 Gbit/s, over the time that"
        " it took"
    ),
    "`cpu`: CPU time of both processes a call, waiting in spin loops included",
    (
        "gRPC: raw bytes with a short header and no protobuf, one message up to 1 MiB and a stream"
        " of 1 MiB chunks beyond; a Unix socket on one host"
    ),
    (
        "torch: default settings on one host; `torch basic` with a private one that is quicker for"
        " small tensors; between hosts with that one, for direct copies between processes would"
        " pass the link by, and several streams are slower here"
    ),
)


@dataclass(frozen=True, slots=True)
class Phase:
    """What is timed.

    Attributes:
        kind: of call, see ``benchmarks/workers/rpc_subject.py``.
        number: bytes of the argument, or calls in flight; 0 for neither.
        schedule: how often.
        wants_basic: whether torch's setting for small tensors is tried as well.
    """

    kind: str
    number: int
    schedule: Schedule
    wants_basic: bool = False

    @property
    def name(self) -> str:
        """As the workers know it."""
        return f"{self.kind}:{self.number}" if self.number else self.kind

    def takes(self, label: str) -> bool:
        """Whether this contender takes part."""
        if label == TORCH_BASIC:
            return self.wants_basic
        return self.kind in CALLS or label in WITH_REFERENCES or label.startswith("without ")

    @property
    def calls(self) -> int:
        """In one step."""
        return CALLS_PER_STEP if self.kind == "in_flight" else 1

    @property
    def line_bytes(self) -> int:
        """Payload that must cross the line for one call."""
        return self.number * {"identity": 2, "plus_one": 2, "ops": 2, "send": 1}.get(self.kind, 0)

    @property
    def call(self) -> str:
        """In the table."""
        names = {"plus_one": "x + 1", "ops": "200 ops", "in_flight": f"{self.number} in flight"}
        return names.get(self.kind, self.kind)

    @property
    def in_plot(self) -> Row:
        """The panel that it belongs to, and its place there."""
        if self.kind == "in_flight":
            return {"kind": "1 KB in flight", "case": str(self.number)}
        return {"kind": self.call, "case": self.size}

    @property
    def size(self) -> str:
        """In the table."""
        if self.kind == "in_flight":
            return size_name(KB)
        return size_name(self.number) if self.number else ""


def size_name(nbytes: int) -> str:
    """Decimal, as in the paper.

    >>> size_name(1000), size_name(40_000_000)
    ('1 KB', '40 MB')
    """
    return f"{nbytes // MB} MB" if nbytes >= MB else f"{nbytes // KB} KB"


QUICK = Schedule(rounds=3, steps_per_round=10, warmup_steps=2)
FEW = Schedule(rounds=3, steps_per_round=10, warmup_steps=2)
ONCE = Schedule(rounds=1, steps_per_round=10, warmup_steps=1)
USUAL = Schedule(rounds=5, steps_per_round=20, warmup_steps=5)
MANY = Schedule(rounds=5, steps_per_round=400, warmup_steps=100)


def phases_on_one_host(quick: bool) -> list[Phase]:
    """All kinds; in a hurry what fits into a minute."""
    if quick:
        sizes = [Phase("identity", size, QUICK) for size in (4 * MB, 40 * MB)]
        return [
            Phase("identity", KB, replace(QUICK, steps_per_round=200)),
            *sizes,
            Phase("plus_one", 4 * MB, QUICK),
            Phase("in_flight", 16, replace(QUICK, rounds=2)),
        ]
    return [
        Phase("identity", KB, MANY, wants_basic=True),
        *(Phase("identity", size, FEW if size == 400 * MB else USUAL) for size in LARGE),
        Phase("plus_one", KB, MANY, wants_basic=True),
        *(Phase("plus_one", size, FEW if size == 400 * MB else USUAL) for size in LARGE),
        *(
            Phase("ops", size, schedule)
            for size, schedule in zip((KB, *LARGE), (MANY, USUAL, FEW, ONCE), strict=True)
        ),
        *(Phase("in_flight", count, FEW, wants_basic=True) for count in (1, 16, 256)),
        *(Phase("rref", size, FEW if size == 400 * MB else USUAL) for size in LARGE),
        *(Phase(kind, 0, USUAL) for kind in ("norpc", "nograd", "grad")),
    ]


def phases_of_ablation(quick: bool) -> list[Phase]:
    """Small calls, many at a time, large tensors and references, in more rounds than usual.

    The differences are small.
    """
    if quick:
        return [
            Phase("identity", KB, replace(QUICK, steps_per_round=100)),
            Phase("identity", 4 * MB, QUICK),
        ]
    return [
        *(Phase(kind, KB, replace(MANY, rounds=11)) for kind in ("identity", "ops")),
        *(Phase("identity", size, replace(USUAL, rounds=11)) for size in (4 * MB, 40 * MB)),
        *(Phase("in_flight", count, replace(FEW, rounds=7)) for count in (16, 256)),
        Phase("rref", 4 * MB, replace(USUAL, rounds=11)),
    ]


def phases_between_hosts() -> list[Phase]:
    """Up to 40 MB, which takes a third of a second at 1 Gbit/s."""
    small = [Phase(kind, KB, MANY) for kind in ("identity", "plus_one", "ops")]
    large = [
        Phase(kind, size, FEW)
        for kind in ("identity", "plus_one", "send", "ops")
        for size in (4 * MB, 40 * MB)
    ]
    return [*small, *large, Phase("in_flight", 256, FEW)]


def lineup(phases: Sequence[Phase]) -> Lineup:
    """Who takes part in some phase, ours first, and a note for who cannot."""
    has_grpc = find_spec("grpc") is not None
    able = [
        label
        for label in WORKERS
        if any(phase.takes(label) for phase in phases) and (has_grpc or label != GRPC)
    ]
    specs = tuple(ContenderSpec(label, WORKERS[label], our_python()) for label in able)
    missing = (
        f"**{GRPC} left out**: got no module grpc; need the extra `bench`; do: pip install"
        " 'pibroch[bench]'"
    )
    return Lineup(specs, () if has_grpc else (missing,))


@topic(
    "rpc",
    "remote calls, references and distributed autograd, against torch.distributed.rpc and gRPC;"
    " hosts need root",
    sections=("calls", "ablation"),
    quick_sections=("calls",),
)
def run(options: Options) -> Report:
    """Measure calls against others, or what each latency policy is worth."""
    return ablation(options) if options.section == "ablation" else calls(options)


def ablation(options: Options) -> Report:
    """Pairs without one latency policy each, in turns with a pair that has all, on one host."""
    load = ForeignLoad()
    phases = phases_of_ablation(options.quick)
    with pairs(rpc_ablation.specs(), None, load) as running:
        versions = prepare(running, ONE_HOST, options)
        rows = measure_all(running, ONE_HOST, phases, options)
    notes = [*rpc_ablation.worth(rows), noise_note(load), *rpc_ablation.MEANINGS]
    return Report(
        "rpc-ablation",
        "Latency policies of remote calls",
        rows,
        COLUMNS,
        PLOT,
        notes,
        provenance() | versions,
    )


def calls(options: Options) -> Report:
    """Measure on one host, and between two hosts where a lab can be built and time is not short."""
    load = ForeignLoad()
    phases = phases_on_one_host(options.quick)
    on_one_host = lineup(phases)
    with pairs(on_one_host.specs, None, load) as running:
        versions = prepare(running, ONE_HOST, options)
        rows = measure_all(running, ONE_HOST, phases, options)
        idle = ", ".join(f"{pair.spec.label} {pair.idle(IDLE_S):.0f} ms" for pair in running)
    notes = [f"CPU time of an idle pair, a second: {idle}", *on_one_host.notes]
    hindrance = obstacle()
    if hindrance is not None:
        notes.append(f"**two hosts left out**: {hindrance}")
    elif not options.quick:
        phases = phases_between_hosts()
        with Lab(2, rate=LINE_RATE) as lab, pairs(lineup(phases).specs, lab, load) as running:
            prepare(running, LINE_RATE, options)
            rows += measure_all(running, LINE_RATE, phases, options)
    notes = [*headlines(rows), *notes, lines_note(), noise_note(load), *MEANINGS]
    return Report(
        "rpc", "Remote calls with tensors", rows, COLUMNS, PLOT, notes, provenance() | versions
    )


def prepare(
    running: list[Pair], where: str, options: Options, sizes: int = CHECKED_SIZES
) -> dict[str, str]:
    """Let the pairs join, and check their results for the smallest sizes.

    Raises:
        BenchmarkError: when one gives another result than a local call.
    """
    versions: dict[str, str] = {}
    for pair in running:
        options.say(f"{where}: {pair.spec.label} checks its results")
        versions |= pair.setup(CASE)
        pair.check(sizes)
    return versions


def measure_all(
    running: list[Pair], where: str, phases: Sequence[Phase], options: Options
) -> list[Row]:
    """Rows of all phases.

    ``norpc``, ``nograd`` and ``grad`` give theirs from the parts of their steps.
    """
    rows: list[Row] = []
    for phase in phases:
        options.say(f"{where}, {phase.call} {phase.size}")
        able = [pair for pair in running if phase.takes(pair.spec.label)]
        for pair in able:
            pair.check(0)
        times = measure(able, phase.name, phase.schedule)
        if phase.kind in AUTOGRAD:
            rows += autograd_rows(where, phase, {pair.spec.label: pair.check(0) for pair in able})
        else:
            rows += phase_rows(where, phase, times)
    return rows


def phase_rows(where: str, phase: Phase, times: dict[str, Times]) -> list[Row]:
    """One row a contender."""
    rows = rows_of(
        {"where": where, "call": phase.call, "size": phase.size, **phase.in_plot},
        times,
        phase.calls,
    )
    line_ms = phase.line_bytes / LINE_BYTES_PER_S * 1e3
    for row in rows:
        cpu_ms = times[row["contender"]].cpu_ms
        row["cpu_ms"] = sum(cpu_ms) / len(cpu_ms) / phase.calls
        row["cpu"] = duration(row["cpu_ms"])
        if phase.kind == "in_flight":
            row["calls_per_second"] = 1e3 / row["p50_ms"]
        if where == LINE_RATE and phase.number >= MB:
            row["line_share"] = line_ms / row["p50_ms"]
    return rows


def autograd_rows(where: str, phase: Phase, parts: dict[str, dict[str, list[float]]]) -> list[Row]:
    """Rows of the forward and of the backward part of each timed step.

    Warm-up steps and those that open a turn are left out.
    """
    warmup = phase.schedule.warmup_steps
    rounds = phase.schedule.rounds
    rows: list[Row] = []
    for part in (f"{phase.kind}-fwd", f"{phase.kind}-bwd"):
        if part != "nograd-bwd":
            turns = {label: split(series[part][warmup:], rounds) for label, series in parts.items()}
            times = {label: Times([steps[1:] for steps in own]) for label, own in turns.items()}
            rows += rows_of(
                {"where": where, "call": part, "size": "", "kind": "two layers", "case": part},
                times,
            )
    if phase.kind == "norpc":  # a local step, the same for all: a ratio would look like a result
        for row in rows:
            row |= {"over_pibroch": None, "over_least": None, "over_most": None}
    return rows


def rows_of(names: Row, times: dict[str, Times], calls: int = 1) -> list[Row]:
    """One row a contender with the same columns whatever was timed.

    Times twice, as numbers and as text with three digits.
    """
    rows = []
    for label, own in times.items():
        milliseconds = {f"p{percent}": own.percentile(percent) / calls for percent in (20, 50, 80)}
        ratios = own.ratios_to(times[OURS]) if OURS in times else []
        rows.append(
            {
                **names,
                "contender": label,
                **{f"{name}_ms": value for name, value in milliseconds.items()},
                "over_pibroch": median(ratios) if ratios else None,
                "over_least": min(ratios, default=None),
                "over_most": max(ratios, default=None),
                "calls_per_second": None,
                "line_share": None,
                "cpu_ms": None,
                **{name: duration(value) for name, value in milliseconds.items()},
                "cpu": None,
            }
        )
    return rows


def split(values: list[float], rounds: int) -> list[list[float]]:
    """Into rounds of equal length.

    >>> split([1, 2, 3, 4], 2)
    [[1, 2], [3, 4]]
    """
    size = len(values) // rounds
    return [values[turn * size : (turn + 1) * size] for turn in range(rounds)]


def duration(milliseconds: float) -> str:
    """With three digits.

    >>> duration(0.04213), duration(38.251), duration(2541.0)
    ('42.1 us', '38.3 ms', '2.54 s')
    """
    for factor, unit in ((1e3, "us"), (1, "ms")):
        if milliseconds * factor < 1000:
            return f"{milliseconds * factor:.3g} {unit}"
    return f"{milliseconds / 1e3:.3g} s"


def headlines(rows: list[Row]) -> list[str]:
    """What the numbers say about pibroch, one line a call."""
    lines = []
    for ours in rows:
        if ours["contender"] != OURS or ours["call"].startswith(("norpc", "200")):
            continue
        same = ("where", "call", "size")
        others = [
            r
            for r in rows
            if all(r[k] == ours[k] for k in same) and r["contender"] != OURS and r["over_pibroch"]
        ]
        against = ", ".join(
            f"{other['contender']} takes {other['over_pibroch']:.1f}x as long" for other in others
        )
        share = f"; {ours['line_share']:.0%} of the line's rate" if ours["line_share"] else ""
        what = " ".join(part for part in (ours["where"], ours["call"], ours["size"]) if part)
        lines.append(f"**{what}: pibroch {ours['p50']}{share}; {against}**")
    return lines


def lines_note() -> str:
    """Lines of code that the user of each writes to call ``identity``."""
    folder = Path(__file__).resolve().parent.parent / "workers"
    counts = {
        label: code_lines((folder / name).read_text("utf-8")) for label, name in EXAMPLES.items()
    }
    listed = ", ".join(f"{label} {count}" for label, count in counts.items())
    return (
        "lines of user code for one identity call (`benchmarks/workers/rpc_identity_*.py`):"
        f" {listed}"
    )


def code_lines(source: str) -> int:
    """Lines that are neither empty nor comments nor the module's docstring.

    >>> code_lines(chr(10).join(['"Says what."', "", "x = 1", "# why", "y = 2"]))
    2
    """
    first = ast.parse(source).body[0]
    docstring = (
        first.end_lineno
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        else 0
    )
    lines = source.splitlines()[docstring or 0 :]
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in lines)
