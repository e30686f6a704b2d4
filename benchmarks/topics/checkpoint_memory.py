"""How much memory and time checkpoints of a Criteo-Kaggle-shaped model take.

33.8 M rows in 26 tables, dim 16, Adagrad. Some ranks save, row-wise, a full and an incremental
checkpoint; as many or others load it, table-wise. Needs 5.5 GB of memory and as much disk. Fails
when a process takes more than 1 GiB above its tables.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pibroch as pb
from benchmarks.contender import BenchmarkError
from benchmarks.plots import PlotSpec
from benchmarks.provenance import provenance
from benchmarks.registry import Options, topic
from benchmarks.results import Report, Row
from benchmarks.workers.memory import peak_rss_bytes
from pibroch.collectives.world import World, world_of_environment
from pibroch.config.recipes import check_config
from pibroch.data import EncodedDataset
from pibroch.data.synthetic import SyntheticOptions, synthesize
from pibroch.embedding.row_marks import SAVED
from pibroch.models import build_model
from pibroch.ports import free_port
from pibroch.state.checkpoint_folder import CheckpointFolder
from pibroch.state.manifest import Progress
from pibroch.train.session import Session

KAGGLE_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992,
    5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
DIM = 16
ALLOWED_BYTES = 1 << 30
GIB = 1 << 30
TOUCHED_SHARE = 0.05
QUICK_SCALE = 0.01
RANKS = ((1, 1), (2, 2), (2, 1))
"""How many save, and how many load."""
TIMEOUT_S = 900
COLUMNS = [
    "saved_by", "loaded_by", "phase", "rank", "tables_gib", "above_before_gib", "above_gib",
    "save_s", "save_incremental_s", "load_s",
]  # fmt: skip
PLOT = PlotSpec(
    "above_gib", ("saved_by", "loaded_by"), "phase", "rank", "GiB beside the tables", decimals=2
)
MEANINGS = (
    "`above_gib`: most resident memory of the process less its tables, `above_before_gib` before"
    " it saves or loads",
    f"`save_incremental_s`: with {TOUCHED_SHARE:.0%} of the rows touched; times depend on the disk",
)


def build(dataset: EncodedDataset, world: World, placement: str, scale: float) -> Session:
    """The session of one rank."""
    tables = [
        pb.Table(f"C{i + 1}", max(1, int(rows * scale)), DIM) for i, rows in enumerate(KAGGLE_ROWS)
    ]
    exchange: dict[str, Any] = {"exchange": "local"}
    if world.ranks.world_size > 1:
        exchange = {
            "exchange": "alltoall",
            "placement": placement,
            "channel": world.ranks.open_channel(),
        }
    embeddings = pb.Embeddings(tables, pb.Adagrad(lr=0.01), **exchange)
    model = build_model("dlrm", 13, len(tables), dim=DIM)
    raw = {
        "data": {"dir": str(dataset.path)},
        "model": {"name": "dlrm", "dim": DIM},
        "embedding": {"optimizer": {"name": "adagrad", "lr": 0.01}},
        "optimizer": {"name": "adam", "lr": 0.001},
        "train": {"epochs": 1, "batch_size": 1024},
    }
    config = check_config(raw, "the benchmark")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    return Session(config, dataset, embeddings, model, optimizer, None, world)


def save(session: Session, folder: Path) -> dict[str, float]:
    """A full checkpoint, then an incremental one; seconds of each."""
    checkpoints = CheckpointFolder(folder, 2, 2, session.world.control)
    seconds = {"save_s": timed(lambda: checkpoints.save(session, Progress(step=1)))}
    generator = np.random.default_rng(0)
    for view in session.embeddings.pieces():
        view.marks[SAVED][:] = generator.random(len(view.piece.rows), np.float32) < TOUCHED_SHARE
    return seconds | {
        "save_incremental_s": timed(lambda: checkpoints.save(session, Progress(step=2)))
    }


def load(session: Session, folder: Path) -> dict[str, float]:
    """The incremental checkpoint, verified; seconds."""
    checkpoints = CheckpointFolder(folder, 2, 2, session.world.control)
    return {"load_s": timed(lambda: checkpoints.resume(session))}


def timed(work: Callable[[], object]) -> float:
    """Seconds of ``work``."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def worker(rank: int, size: int, port: int, phase: str, arguments: dict[str, Any]) -> None:
    """One rank of one phase; writes its figures beside the checkpoints."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    work, placement = (save, "row_wise") if phase == "save" else (load, "table_wise")
    with world_of_environment() as world:
        session = build(
            EncodedDataset.open(arguments["data"]), world, placement, arguments["scale"]
        )
        tables = session.embeddings.num_bytes
        before = peak_rss_bytes() - tables
        figures = work(session, Path(arguments["out"]) / "checkpoints")
        above = peak_rss_bytes() - tables
    figures |= {
        "tables_gib": tables / GIB,
        "above_before_gib": before / GIB,
        "above_gib": above / GIB,
    }
    result = {
        "phase": phase,
        "rank": rank,
        **{name: round(value, 2) for name, value in figures.items()},
    }
    (Path(arguments["out"]) / f"{phase}-{rank}.json").write_text(json.dumps(result))


def run_phase(phase: str, size: int, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """All ranks of a phase, each a fresh process; returns their figures."""
    port = free_port()
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=worker, args=(rank, size, port, phase, arguments))
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(TIMEOUT_S)
        if process.exitcode != 0:
            raise BenchmarkError(f"{phase} failed: exit code {process.exitcode}")
    return [
        json.loads((Path(arguments["out"]) / f"{phase}-{rank}.json").read_text())
        for rank in range(size)
    ]


@topic("checkpoint_memory", "memory and time of checkpoints of 33.8 M rows")
def run(options: Options) -> Report:
    """Save and load with some numbers of ranks.

    Raises:
        BenchmarkError: when a process takes more than 1 GiB above its tables.
    """
    data = options.scratch / "data"
    synthesize(SyntheticOptions(num_samples=1000, max_table_rows=10), data)
    rows: list[Row] = []
    for num_saving, num_loading in RANKS[:1] if options.quick else RANKS:
        options.say(f"saved by {num_saving}, loaded by {num_loading}")
        out = options.scratch / f"{num_saving}-{num_loading}"
        out.mkdir()
        scale = QUICK_SCALE if options.quick else 1.0
        arguments = {"out": str(out), "data": str(data), "scale": scale}
        figures = run_phase("save", num_saving, arguments)
        figures += run_phase("load", num_loading, arguments)
        shutil.rmtree(out)  # each leaves as much on the disk as its tables take
        rows += [{"saved_by": num_saving, "loaded_by": num_loading, **each} for each in figures]
    most = max(row["above_gib"] for row in rows)
    if most * GIB > ALLOWED_BYTES:
        raise BenchmarkError(f"a process took {most} GiB above its tables, 1 GiB is allowed")
    title = "Memory and time of checkpoints"
    return Report("checkpoint_memory", title, rows, COLUMNS, PLOT, list(MEANINGS), provenance())
