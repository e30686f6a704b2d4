"""What every contender must build: one model, one optimizer, one set of starting weights.

Imported by workers in environments that have no pibroch, so it needs NumPy alone. Starting weights
are drawn per table from ``[seed, table]``: every process gets the same bits without a file as large
as the model, which would count as memory of whoever maps it.

Shape legend: B samples, F features (one table each), D embedding dim, R rows of a table, n dense
features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

BOTTOM_HIDDEN = (512, 256)
TOP_SIZES = (512, 256, 1)
CHECK_STEPS = 6  # that contenders take before they are measured, to show that they agree
DENSE_STREAM = 1_000_000
BOTTOM_STREAM = 2_000_000
TOP_STREAM = 3_000_000


@dataclass(frozen=True, slots=True)
class Case:
    """One measured configuration; travels to the workers as JSON.

    Attributes:
        data: the ``.npz`` written by ``benchmarks.workloads``.
        sparse_optimizer: ``sgd``, ``adagrad``, ``rowwise_adagrad`` (state is the row's mean
            squared gradient) or ``adam``.
        dense_lr: of plain SGD on the dense layers.
        threads: of torch and of pibroch's kernels alike.
        model: name of the dense model; all but ``dlrm`` are pibroch's own, with starting weights
            drawn from ``seed``.
        exchange_options: of pibroch's exchange between ranks.
        reports_parts: whether ranks tell of each step its loss and the parts of its time.
        most_ids: of a bag, which has 1 to so many; ``data`` then holds so many for each.
        ids_per_bag: of all bags alike; ``data`` then holds so many for each.
        pooling: ``sum``, ``mean`` or ``weighted``, a sum with a factor for each id.
    """

    data: str
    dim: int
    batch_size: int = 2048
    num_tables: int = 26
    num_rows: int = 100_000
    num_dense: int = 13
    sparse_optimizer: str = "adagrad"
    sparse_lr: float = 0.05
    dense_lr: float = 0.01
    eps: float = 1e-8
    threads: int = 2
    seed: int = 2021
    model: str = "dlrm"
    exchange_options: dict[str, Any] = field(default_factory=dict)
    reports_parts: bool = False
    most_ids: int = 1
    ids_per_bag: int = 1
    pooling: str = "sum"

    def as_json(self) -> dict[str, Any]:
        """The case as plain data."""
        return asdict(self)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all embedding weights."""
        return 4 * self.num_tables * self.num_rows * self.dim

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state that the mathematics needs for all rows."""
        per_row = {
            "sgd": 0,
            "adagrad": self.dim,
            "rowwise_adagrad": 1,
            "adam": 2 * self.dim,
        }[self.sparse_optimizer]
        return 4 * self.num_tables * self.num_rows * per_row

    @property
    def bottom_sizes(self) -> tuple[int, ...]:
        """Widths from the dense features to the embedding dim, input included."""
        return (self.num_dense, *BOTTOM_HIDDEN, self.dim)

    @property
    def top_sizes(self) -> tuple[int, ...]:
        """Widths from the interaction's output to the logit, input included."""
        nodes = self.num_tables + 1
        return (self.dim + nodes * (nodes - 1) // 2, *TOP_SIZES)


@dataclass(frozen=True, slots=True)
class Arrays:
    """Some batches: ids int64 ``[N, F, B]``, dense float32 ``[N, B, n]``, labels ``[N, B]``."""

    ids: NDArray[np.int64]
    dense: NDArray[np.float32]
    labels: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.ids)

    def save(self, path: Path) -> None:
        """Write all batches as one uncompressed ``.npz``."""
        np.savez(path, ids=self.ids, dense=self.dense, labels=self.labels)

    @classmethod
    def load(cls, path: str | Path) -> Arrays:
        """Read what ``save`` wrote."""
        with np.load(path) as stored:
            return cls(stored["ids"], stored["dense"], stored["labels"])


def initial_table(case: Case, table: int) -> NDArray[np.float32]:
    """Starting weights of one table, float32 ``[R, D]``, uniform in ``±0.25``.

    Large enough for the loss to tell wrong rows.
    """
    draw = np.random.default_rng([case.seed, table]).random(
        (case.num_rows, case.dim), dtype=np.float32
    )
    draw -= np.float32(0.5)
    draw *= np.float32(0.5)
    return draw


def initial_layers(
    case: Case, stream: int
) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Starting ``(weight [out, in], bias [out])`` of the bottom or the top network, layer by layer.

    The first top layer's columns are: the bottom's D outputs, then the pairs of ``lower_pairs`` in
    that order.
    """
    sizes = case.bottom_sizes if stream == BOTTOM_STREAM else case.top_sizes
    for layer, (width_in, width_out) in enumerate(pairwise(sizes)):
        draw = np.random.default_rng([case.seed, stream + layer]).random(
            (width_out, width_in + 1), dtype=np.float32
        )
        draw = (draw * 2 - 1) / np.float32(np.sqrt(width_in))
        yield np.ascontiguousarray(draw[:, :-1]), np.ascontiguousarray(draw[:, -1])


def lower_pairs(num_nodes: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The interaction's pairs in the order of this benchmark's weights; node 0 is the dense vector.

    >>> [pair.tolist() for pair in lower_pairs(3)]
    [[1, 2, 2], [0, 0, 1]]
    """
    first, second = np.tril_indices(num_nodes, -1)
    return first, second
