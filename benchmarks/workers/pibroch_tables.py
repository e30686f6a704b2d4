"""pibroch's tables, optimizers and batches for a case."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import pibroch as pb
from benchmarks.cases import Case, initial_table
from benchmarks.workers.parts import Parts
from pibroch.collectives import Ranks
from pibroch.embedding import MemoryShard, SparseOptimizer
from pibroch.kernels.arrays import Ints

_STARTING: dict[int, NDArray[np.float32]] = {}


@dataclass(frozen=True, slots=True)
class StartingWeights:
    """Of each id those that ``initial_table`` has in the row of that number."""

    case: Case
    table: int

    def fill(self, weights: NDArray[np.float32], rows: Ints, key: int) -> None:
        """See :class:`pibroch.embedding.Initializer`."""
        if self.table not in _STARTING:  # drawn once: steps are timed
            _STARTING[self.table] = initial_table(self.case, self.table)
        weights[:] = _STARTING[self.table][rows]


def tables(case: Case, are_hashed: bool = False) -> list[pb.Table]:
    """One table a feature, to be filled by ``load_tables``; of raw ids none needs filling."""
    if are_hashed:
        return [
            pb.Table(
                f"C{t}",
                case.num_rows,
                case.dim,
                initializer=StartingWeights(case, t),
                rows=pb.Hashed(),
            )
            for t in range(case.num_tables)
        ]
    return [
        pb.Table(
            f"C{t}",
            case.num_rows,
            case.dim,
            initializer=pb.Zeros(),
            pooling="mean" if case.pooling == "mean" else "sum",
        )
        for t in range(case.num_tables)
    ]


def sparse_optimizer(case: Case) -> SparseOptimizer:
    """The optimizer that the case asks for."""
    if case.sparse_optimizer == "sgd":
        return pb.SGD(lr=case.sparse_lr)
    kind: Callable[..., SparseOptimizer] = {
        "adagrad": pb.Adagrad,
        "rowwise_adagrad": pb.RowWiseAdagrad,
        "adam": pb.Adam,
    }[case.sparse_optimizer]
    return kind(lr=case.sparse_lr, eps=case.eps)


def load_tables(shard: MemoryShard, case: Case) -> None:
    """Copy the case's starting weights in."""
    for table in range(case.num_tables):
        shard.weights(f"C{table}")[:] = initial_table(case, table)


def jagged_batches(ids_NFB: Tensor, dense_NBn: Tensor, labels_NB: Tensor) -> list[pb.JaggedBatch]:
    """The stored batches as pibroch's loader would hand them out."""
    keys = [f"C{table}" for table in range(ids_NFB.shape[1])]
    return [
        pb.JaggedBatch.from_one_hot(dense, keys, ids, labels)
        for ids, dense, labels in zip(ids_NFB, dense_NBn, labels_NB, strict=True)
    ]


def parts(case: Case) -> Parts:
    """The parts of this rank's steps; ``wait`` is the time spent waiting for other ranks."""
    reported = Parts(case.reports_parts)
    ranks = Ranks.joined()
    if reported.is_on:
        waiting = ranks.waiting

        @contextmanager
        def counted_waiting() -> Iterator[None]:
            with waiting(), reported.part("wait"):
                yield

        ranks.waiting = counted_waiting  # type: ignore[method-assign]
    return reported


def versions() -> dict[str, str]:
    """Versions of the packages used."""
    return {"pibroch": pb.__version__, "torch": torch.__version__, "numba": version("numba")}
