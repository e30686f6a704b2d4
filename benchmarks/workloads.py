"""The batches that all contenders of a case read.

Drawn ids or the real Criteo sample, written once as one ``.npz``.

Shape legend: N batches, F features, B samples, n dense features.
"""

from __future__ import annotations

import gzip
import os
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.cases import DENSE_STREAM, Arrays
from pibroch.errors import DataError

CHECKOUT = Path(__file__).resolve().parent.parent
SAMPLE_NAME = "criteo_kaggle_137k.tsv.gz"
NUM_DENSE = 13
NUM_CATEGORICAL = 26


@dataclass(frozen=True, slots=True)
class Workload:
    """Which ids.

    ``kind`` is ``zipf`` (exponent ``skew``, any but 1; 0 is uniform), ``hot`` (``skew`` of the
    lookups read 1 % of the rows, which are alike, and so are the others), ``uniform`` or
    ``criteo``.
    """

    kind: str
    num_batches: int
    batch_size: int
    num_tables: int = NUM_CATEGORICAL
    num_rows: int = 100_000
    skew: float = 1.05
    seed: int = 7

    def write(self, folder: Path) -> Path:
        """Write the batches into ``folder`` and return the file; an existing one is used again."""
        shape = f"{self.num_batches}x{self.num_tables}x{self.batch_size}_{self.num_rows}"
        path = (
            folder / f"{self.kind}{self.skew if self.kind in ('zipf', 'hot') else ''}_{shape}.npz"
        )
        if not path.exists():
            (criteo_batches(self) if self.kind == "criteo" else drawn_batches(self)).save(path)
        return path


def drawn_batches(workload: Workload) -> Arrays:
    """Uniform, hot or Zipf ids, uniform dense values, 30 % clicks."""
    rng = np.random.default_rng([workload.seed, DENSE_STREAM])
    shape = (workload.num_batches, workload.num_tables, workload.batch_size)
    uniform = rng.random(shape)
    ids = {"zipf": zipf_ids, "hot": hot_ids, "uniform": uniform_ids}[workload.kind](
        uniform, workload
    )
    samples = (workload.num_batches, workload.batch_size)
    dense = rng.random((*samples, NUM_DENSE), dtype=np.float32)
    return Arrays(ids, dense, (rng.random(samples) < 0.3).astype(np.float32))


def zipf_ids(uniform: NDArray[np.float64], workload: Workload) -> NDArray[np.int64]:
    """Ranks by inverting the continuous Zipf distribution, then scattered."""
    power = 1.0 - workload.skew
    ranks = (((workload.num_rows + 1) ** power - 1) * uniform + 1) ** (1 / power) - 1
    return scattered(np.minimum(ranks.astype(np.int64), workload.num_rows - 1), workload.num_rows)


def hot_ids(uniform: NDArray[np.float64], workload: Workload) -> NDArray[np.int64]:
    """The first hundredth of the rows, then scattered as Zipf's, for ``skew`` of the draws.

    The other rows for the rest.
    """
    num_hot = max(1, workload.num_rows // 100)
    share = workload.skew
    hot = uniform / share * num_hot
    cold = num_hot + (uniform - share) / (1 - share) * (workload.num_rows - num_hot)
    return scattered(np.where(uniform < share, hot, cold).astype(np.int64), workload.num_rows)


def uniform_ids(uniform: NDArray[np.float64], workload: Workload) -> NDArray[np.int64]:
    """All rows alike."""
    return (uniform * workload.num_rows).astype(np.int64)


def scattered(ranks: NDArray[np.int64], num_rows: int) -> NDArray[np.int64]:
    """Rows by rank, hot ones not neighbours.

    A multiplication without a factor common with ``num_rows`` permutes.
    """
    rows: NDArray[np.int64] = ranks * 2_654_435_761 % num_rows
    return rows


def sample_path() -> Path | None:
    """The real Criteo sample, or ``None`` where it is absent."""
    folder = Path(os.environ.get("PIBROCH_TEST_DATA", CHECKOUT.parent / "shared" / "data"))
    return folder / SAMPLE_NAME if (folder / SAMPLE_NAME).is_file() else None


def criteo_batches(workload: Workload) -> Arrays:
    """The sample's first rows, then all of them again as often as needed, each time shuffled.

    A categorical value is hashed to a row, integers become ``log1p`` of their positive part.

    Raises:
        DataError: when the sample is absent.
    """
    path = sample_path()
    if path is None:
        raise DataError(
            f"no {SAMPLE_NAME}",
            "the Criteo sample",
            "set PIBROCH_TEST_DATA to its folder, or use zipf ids",
        )
    needed = workload.num_batches * workload.batch_size
    with gzip.open(path, "rt") as lines:
        rows = [line.rstrip("\n").split("\t") for line in islice(lines, needed)]
    labels = np.array([float(row[0]) for row in rows], np.float32)
    integers = np.array(
        [[float(value or 0) for value in row[1 : 1 + NUM_DENSE]] for row in rows], np.float32
    )
    hashed = np.array(
        [[int(value or "0", 16) for value in row[1 + NUM_DENSE :]] for row in rows], np.int64
    )
    rng = np.random.default_rng(workload.seed)
    passes = [rng.permutation(len(rows)) for _ in range(len(rows), needed, len(rows))]
    order = np.concatenate([np.arange(len(rows)), *passes])[:needed]
    ids = hashed[order] % workload.num_rows
    shape = (workload.num_batches, workload.batch_size)
    return Arrays(
        np.ascontiguousarray(ids.reshape(*shape, NUM_CATEGORICAL).transpose(0, 2, 1)),
        np.log1p(np.maximum(integers[order], 0)).reshape(*shape, NUM_DENSE),
        labels[order].reshape(shape),
    )
