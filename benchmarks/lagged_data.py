"""Batches that inference is measured on.

They are files of ids, dense features and bag lengths, from which each rank reads its own.
"""

from __future__ import annotations

import csv
import gzip
from itertools import islice
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from benchmarks.workloads import NUM_DENSE, Workload, sample_path

AVAZU_NAME = "avazu_15k.csv.gz"
NUM_TABLES = 8
NUM_ROWS = 20_000
BATCH_SIZE = 256
MOST_VECTORS = 100
RAGGED_BATCH_SIZE = 16
SAMPLE_BATCHES = 56
TRACE_BATCHES = 1000


def write_case(name: str, folder: Path) -> Path | None:
    """The file of a case; ``None`` where a sample is absent.

    ``plain``: skewed ids, one a table; ``sizes``: 1 to 100 of them a table and sample (Sec. V-E,
    setting 1); ``criteo`` and ``avazu``: the samples, hashed; ``trace``: a long generated one, of
    Criteo's shape.
    """
    path = folder / f"lagged_{name}.npz"
    if path.exists():
        return path
    result = {
        "plain": _plain,
        "sizes": _sizes,
        "criteo": _criteo,
        "avazu": _avazu,
        "trace": _trace,
    }[name](folder)
    if result is None:
        return None
    arrays: dict[str, Any] = result  # by names, none of which is savez's own keyword
    np.savez(path, **arrays)
    return path


def _plain(folder: Path) -> dict[str, np.ndarray]:
    return _drawn(64, BATCH_SIZE, False)


def _sizes(folder: Path) -> dict[str, np.ndarray]:
    return _drawn(64, RAGGED_BATCH_SIZE, True)


def _drawn(num_batches: int, batch_size: int, ragged: bool) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(5)
    lengths = draw.integers(1, MOST_VECTORS + 1, (num_batches, NUM_TABLES, batch_size))
    if not ragged:
        lengths[:] = 1
    ids = (draw.zipf(1.2, int(lengths.sum())) - 1) % NUM_ROWS
    dense = draw.standard_normal((num_batches, batch_size, NUM_DENSE), np.float32)
    return {"ids": ids, "lengths": lengths, "dense": dense}


def _criteo(folder: Path) -> dict[str, np.ndarray] | None:
    if sample_path() is None:
        return None
    return _one_hot(Workload("criteo", SAMPLE_BATCHES, BATCH_SIZE, num_rows=NUM_ROWS).write(folder))


def _trace(folder: Path) -> dict[str, np.ndarray]:
    return _one_hot(Workload("zipf", TRACE_BATCHES, BATCH_SIZE, num_rows=NUM_ROWS).write(folder))


def _one_hot(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as arrays:
        ids = arrays["ids"]
        dense = arrays["dense"]
    return {"ids": ids.reshape(-1), "lengths": np.ones(ids.shape, np.int64), "dense": dense}


def _avazu(folder: Path) -> dict[str, np.ndarray] | None:
    path = sample_path()
    path = None if path is None else path.with_name(AVAZU_NAME)
    if path is None or not path.is_file():
        return None
    with gzip.open(path, "rt", newline="") as lines:
        rows = list(islice(csv.reader(lines), 1, 1 + SAMPLE_BATCHES * BATCH_SIZE))
    hashed = np.array(
        [[crc32(value.encode()) % NUM_ROWS for value in row[1:]] for row in rows], np.int64
    )
    shape = (SAMPLE_BATCHES, BATCH_SIZE, hashed.shape[1])
    ids = np.ascontiguousarray(hashed.reshape(shape).transpose(0, 2, 1))
    dense = np.zeros((SAMPLE_BATCHES, BATCH_SIZE, NUM_DENSE), np.float32)  # Avazu has none
    return {"ids": ids.reshape(-1), "lengths": np.ones(ids.shape, np.int64), "dense": dense}
