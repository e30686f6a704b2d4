"""Lookup and update cell by cell, over the shapes that tables and batches come in.

Against FBGEMM's table-batched embeddings on the CPU and torch's ``nn.EmbeddingBag``. CPU time of
one thread, through each library's module as users call it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from benchmarks.cases import Case
from benchmarks.comparison import OURS, Lineup, Outcome, arena, noise_note
from benchmarks.load import ForeignLoad
from benchmarks.plots import PlotSpec
from benchmarks.provenance import provenance
from benchmarks.registry import Options, topic
from benchmarks.results import Report, Row
from benchmarks.runner import Schedule
from benchmarks.workloads import Workload

FBGEMM, TORCH = "FBGEMM TBE", "torch EmbeddingBag"
PHASES = {"inference": "lookup", "training": "lookup+update"}
GOAL = 0.9
FBGEMM_DIMS = 4  # it has multiples of it alone
MOST_NUMBERS = 100_000_000  # weights of all tables of a cell
ADAM_EPS = 1e-14  # torch adds it to moments before their correction, pibroch behind it
MOST_TORCH_IDS = 100_000  # of a batch with which torch trains: it takes ten times as long
COLUMNS = ["axis", "cell", "ids", "rows", "pibroch_us", "peer", "peer_us", "of_peer", "of_best"]
PLOT = PlotSpec(
    "of_peer", ("axis",), "cell", "peer", "pibroch's time over the peer's", None, None, 2
)
MEANINGS = (
    "CPU time of one thread for a call, minimum over the rounds; peers take turns in one run",
    (
        "a call is a module's, autograd included: pibroch's times have its checks of the batch and"
        " of every id; training has the optimizer's step, and pibroch's and FBGEMM's is part of"
        " backward"
    ),
    (
        "one table with few samples is bound by what a call of ours does in Python: about 19 us"
        " whatever the batch, of them 4 for its checks, beside 8 of torch's whole call"
    ),
    (
        "row-wise Adagrad on uniform ids is near the goal, not below it: of 13 ns for a row of 128"
        " bytes that no other id shares, 3 go to its gradient, 5 to the fetch of its record, 5 to"
        " the update"
    ),
    "`of_peer`: pibroch's time over the peer's; `of_best`: over the quickest peer's",
    (
        "where nothing else is said: 8 tables of dim 32, 2,048 samples, one id a bag, Zipf ids,"
        " row-wise Adagrad"
    ),
    (
        "torch has no row-wise Adagrad for sparse gradients; FBGEMM has no Adam on the CPU and only"
        f" dims that are multiples of {FBGEMM_DIMS}; torch does"
        f" not train with more than {MOST_TORCH_IDS:,} ids a batch, where it takes many times as"
        " long"
    ),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One shape.

    Attributes:
        axis: what the cells beside it vary.
        name: of this one among them.
        bag: ids of each.
        pooling: as in :class:`~benchmarks.cases.Case`.
        ids: kind of the workload.
    """

    axis: str
    name: str
    tables: int = 8
    dim: int = 32
    batch: int = 2048
    bag: int = 1
    pooling: str = "sum"
    ids: str = "zipf"
    optimizer: str = "rowwise_adagrad"

    @property
    def num_rows(self) -> int:
        """Of each table."""
        return min(100_000, MOST_NUMBERS // (self.tables * self.dim))

    @property
    def num_ids(self) -> int:
        """Of a batch."""
        return self.tables * self.batch * self.bag

    @property
    def schedule(self) -> Schedule:
        """Enough steps for a clock to see, few enough for large batches."""
        steps = min(200, max(10, ceil(200_000 / (self.num_ids * max(1, self.dim // 32)))))
        return Schedule(rounds=5, steps_per_round=steps, warmup_steps=3)


def inference_cells() -> list[Cell]:
    """What is only looked up."""
    bags = {10: 2048, 100: 1024, 1000: 256, 10_000: 32}
    return [
        *(Cell("samples, 8 tables", f"{n:,}", batch=n) for n in (1, 32, 256, 2048, 32_768)),
        *(Cell("samples, one table", f"{n:,}", tables=1, batch=n) for n in (64, 2048, 65_536)),
        *(Cell("tables of 256 samples", f"{n:,}", tables=n, batch=256) for n in (30, 300, 1000)),
        *(Cell("tables of 32 samples", f"{n:,}", tables=n, batch=32) for n in (300, 1000)),
        *(Cell("dim", f"{n:,}", dim=n) for n in (1, 8, 16, 100, 128, 1024)),
        *(
            Cell("ids a bag, 4 tables", f"{bag:,}", tables=4, batch=batch, bag=bag)
            for bag, batch in bags.items()
        ),
        *(Cell("bags of 5", kind, bag=5, pooling=kind) for kind in ("sum", "mean", "weighted")),
        *(
            Cell("bags of 100, 4 tables", kind, tables=4, batch=1024, bag=100, pooling=kind)
            for kind in ("mean", "weighted")
        ),
    ]


def training_cells() -> list[Cell]:
    """What is looked up and updated."""
    bags = {10: 2048, 100: 1024, 1000: 128}
    return [
        *(Cell("samples, 8 tables", f"{n:,}", batch=n) for n in (32, 256, 2048, 32_768)),
        *(Cell("samples, one table", f"{n:,}", tables=1, batch=n) for n in (64, 2048, 65_536)),
        *(
            Cell("tables × samples", f"{n:,} × {size}", tables=n, batch=size)  # noqa: RUF001
            for n, size in ((300, 256), (1000, 256), (1000, 32))
        ),
        *(Cell("dim", f"{n:,}", dim=n) for n in (8, 16, 100, 128, 1024)),
        Cell("dim", "1", dim=1, optimizer="adagrad"),
        *(
            Cell("ids a bag, 4 tables", f"{bag:,}", tables=4, batch=batch, bag=bag)
            for bag, batch in bags.items()
        ),
        Cell("ids a bag, 4 tables", "10, uniform", tables=4, bag=10, ids="uniform"),
        *(Cell("bags of 5", kind, bag=5, pooling=kind) for kind in ("sum", "mean", "weighted")),
        *(Cell("optimizer", name, optimizer=name) for name in ("sgd", "adagrad", "adam")),
        *(
            Cell("optimizer, uniform ids", name, optimizer=name, ids="uniform")
            for name in ("sgd", "adagrad", "rowwise_adagrad", "adam")
        ),
    ]


@topic(
    "cells",
    "lookup and update over shapes of tables and batches, against FBGEMM's CPU operator and"
    " torch's EmbeddingBag; CPU time of one thread",
    sections=list(PHASES),
    quick_sections=list(PHASES),
)
def run(options: Options) -> Report:
    """Measure a section."""
    updates = options.section == "training"
    builder = "build" if updates else "build_lookup"
    lineup = Lineup.of(
        {OURS: f"cell_pibroch:{builder}", TORCH: f"cell_torch:{builder}"},
        {FBGEMM: f"cell_fbgemm:{builder}"},
    )
    cells = training_cells() if updates else inference_cells()
    load = ForeignLoad()
    rows: list[Row] = []
    with arena(lineup.specs, load) as contenders:
        for cell in cells[::5] if options.quick else cells:
            options.say(f"{options.section}: {cell.axis}: {cell.name}")
            schedule = replace(cell.schedule, rounds=2) if options.quick else cell.schedule
            case = case_of(cell, options)
            phases = (PHASES[options.section],)
            outcome = contenders.compare(case, phases, schedule, absent_from(cell, updates))
            rows += case_rows(cell, outcome, PHASES[options.section])
        versions = contenders.versions
    return Report(
        "cells",
        f"Embeddings cell by cell: {options.section}",
        rows,
        COLUMNS,
        PLOT,
        [*headlines(rows), *lineup.notes, noise_note(load), *MEANINGS],
        provenance() | versions,
    )


def absent_from(cell: Cell, updates: bool) -> frozenset[str]:
    """Peers that cannot look a cell up, or train with it."""
    absent = set[str]()
    if updates and (cell.optimizer == "rowwise_adagrad" or cell.num_ids > MOST_TORCH_IDS):
        absent.add(TORCH)
    if cell.dim % FBGEMM_DIMS or (updates and cell.optimizer == "adam"):
        absent.add(FBGEMM)
    return frozenset(absent)


def case_of(cell: Cell, options: Options) -> Case:
    """The case that all contenders build."""
    num_batches = 2 if cell.num_ids > MOST_TORCH_IDS else 4
    workload = Workload(cell.ids, num_batches, cell.batch * cell.bag, cell.tables, cell.num_rows)
    return Case(
        str(workload.write(options.scratch)),
        cell.dim,
        cell.batch,
        cell.tables,
        cell.num_rows,
        sparse_optimizer=cell.optimizer,
        threads=1,
        eps=ADAM_EPS if cell.optimizer == "adam" else 1e-8,
        ids_per_bag=cell.bag,
        pooling=cell.pooling,
    )


def case_rows(cell: Cell, outcome: Outcome, phase: str) -> list[Row]:
    """One row for each peer."""
    least = {label: min(times.cpu_ms) * 1e3 for label, times in outcome.times[phase].items()}
    own = least.pop(OURS)
    shape = {
        "axis": cell.axis,
        "cell": cell.name,
        "tables": cell.tables,
        "dim": cell.dim,
        "batch": cell.batch,
        "bag": cell.bag,
        "pooling": cell.pooling,
        "ids": cell.ids,
        "rows": cell.num_rows,
        "optimizer": cell.optimizer,
        "pibroch_us": own,
    }
    best = min(least.values(), default=None)
    return [
        shape
        | {
            "peer": label,
            "peer_us": each,
            "of_peer": own / each,
            "of_best": None if best is None else own / best,
        }
        for label, each in least.items()
    ]


def headlines(rows: list[Row]) -> list[str]:
    """How many cells meet the goal, and which do not."""
    of_best = {(row["axis"], row["cell"]): row["of_best"] for row in rows}
    missed = {key: ratio for key, ratio in of_best.items() if ratio > GOAL}
    lines = [
        f"**{len(of_best) - len(missed)} of {len(of_best)} cells take at most {GOAL} times the"
        " quickest peer's time**"
    ]
    if missed:
        worst = sorted(missed.items(), key=lambda each: -each[1])
        named = "; ".join(f"{axis}: {name} {ratio:.2f}" for (axis, name), ratio in worst)
        lines.append(f"above it: {named}")
    return lines
