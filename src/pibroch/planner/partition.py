"""Access- and memory-aware partitioning (OPER, Sec. 4.1).

A partition has rows that are read about equally often, and is small enough to balance shards with.
Rows are ordered by falling count and cut where one more row would pass the threshold on accesses or
on memory. Only rows of the same bytes share a partition, so tables are cut by kind, those of one
dim and optimizer together. A threshold is tried on histograms of counts, which tell what it gives
without another look at the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from numpy.typing import NDArray

from pibroch.errors import ConfigError
from pibroch.kernels.arrays import Array
from pibroch.planner.cost import distinct
from pibroch.planner.kernels import partition as kernels
from pibroch.planner.profile import AccessProfile

if TYPE_CHECKING:
    from pibroch.embedding.optimizers import SparseOptimizer
    from pibroch.embedding.table import Table

Form = Literal["accesses", "transfers"]
MAX_PARTITIONS = 1 << 16  # numbered by uint16
DENSE_COUNTS = 1 << 16  # counts from here on are rows of their own among the runs: few, and sorted


@dataclass(frozen=True, slots=True)
class TableSize:
    """What the planner knows of a table.

    Attributes:
        name: of the table.
        num_rows: of the table.
        weight_bytes: of a row: what is looked up and sent.
        record_bytes: of a row with its optimizer state: what takes memory.
    """

    name: str
    num_rows: int
    weight_bytes: int
    record_bytes: int

    @classmethod
    def of(cls, table: Table, optimizer: SparseOptimizer | None = None) -> Self:
        """Of a table, trained by an optimizer or, without one, for inference."""
        weights = table.dim * (2 if table.dtype == "bfloat16" else 4)
        record = (
            weights if optimizer is None else 4 * optimizer.record_width(table.dim, table.dtype)
        )
        return cls(table.name, table.num_rows, weights, record)

    @property
    def kind(self) -> tuple[int, int]:
        """Tables of one kind share partitions."""
        return self.weight_bytes, self.record_bytes


def total_bytes(tables: Sequence[TableSize]) -> int:
    """Of all records once."""
    return sum(table.num_rows * table.record_bytes for table in tables)


@dataclass(frozen=True, slots=True)
class Partitions:
    """Groups of rows that are placed together; P of them.

    Attributes:
        num_rows: int64 ``[P]``.
        accesses: float64 ``[P]``: accesses to all of its rows a step of one rank.
        transfers: float64 ``[P]``: distinct rows of it that one rank reads a step.
        weight_bytes: int64 ``[P]``: of one row.
        record_bytes: int64 ``[P]``: of one row.
        is_access_bound: bool ``[P]``: whether accesses, not memory, ended it.
    """

    num_rows: NDArray[np.int64]
    accesses: NDArray[np.float64]
    transfers: NDArray[np.float64]
    weight_bytes: NDArray[np.int64]
    record_bytes: NDArray[np.int64]
    is_access_bound: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.num_rows)

    @property
    def memory_bytes(self) -> NDArray[np.float64]:
        """Of all records of a partition, ``[P]``."""
        return np.asarray(self.num_rows * self.record_bytes, np.float64)

    def weight(self, form: Form) -> NDArray[np.float64]:
        """Bytes that one rank reads of each partition in a step, ``[P]``.

        Counted in the form ``accesses`` or ``transfers``.
        """
        return np.asarray(
            (self.accesses if form == "accesses" else self.transfers) * self.weight_bytes
        )


@dataclass(slots=True)
class _Kind:
    """Runs of equal counts in the tables of one kind, by falling count."""

    tables: list[TableSize]
    counts: NDArray[np.int64]
    num_rows: NDArray[np.int64]
    batch_sums: NDArray[np.float64]
    hot_tables: NDArray[np.int64]
    hot_rows: NDArray[np.int64]
    stops: NDArray[np.int64]
    sums: NDArray[np.float64]


class Partitioner:
    """Cuts the rows of a profile by any threshold.

    Args:
        tables: sizes of all tables.
        profile: counts of these tables.
        batch_size: samples of a rank's batch; that of the profile when absent.
    """

    def __init__(
        self, tables: Sequence[TableSize], profile: AccessProfile, batch_size: int | None = None
    ) -> None:
        self.tables = tuple(tables)
        self._profile = profile
        self.batch_size = batch_size or profile.batch_size
        kinds: dict[tuple[int, int], list[TableSize]] = {}
        for table in tables:
            kinds.setdefault(table.kind, []).append(table)
        self._kinds = [self._runs(members) for members in kinds.values()]
        self.num_rows = sum(table.num_rows for table in tables)
        self._memory = float(total_bytes(tables))
        self._accesses = sum(
            float((k.counts * k.num_rows).sum()) * k.tables[0].weight_bytes for k in self._kinds
        )

    def cut(self, threshold: float, limit: int = MAX_PARTITIONS) -> Partitions | None:
        """Partitions of at most ``threshold`` of all accesses and of all memory each.

        ``None`` if they are above the limit.

        0 makes each row a partition.
        """
        parts = []
        for kind in self._kinds:
            size = kind.tables[0]
            max_accesses = threshold * self._accesses / size.weight_bytes
            max_rows = max(1, int(threshold * self._memory / size.record_bytes))
            stops = np.empty(limit, np.int64)
            sums = np.empty((limit, 3))
            num_parts = kernels.cut(
                kind.counts, kind.num_rows, kind.batch_sums, max_accesses, max_rows, stops, sums
            )
            if num_parts < 0:
                return None
            kind.stops = stops[:num_parts]
            kind.sums = sums[:num_parts]
            share = (
                np.maximum(kind.sums[:, 1] / max(max_accesses, 1e-300), 0.0)
                >= kind.sums[:, 0] / max_rows
            )
            parts.append((kind, share))
            limit -= num_parts
        return self._partitions(parts)

    def assign(self) -> dict[str, NDArray[np.uint16]]:
        """The partition of each row, uint16 ``[num_rows]`` by table, of the last :meth:`cut`."""
        out: dict[str, NDArray[np.uint16]] = {}
        first = 0
        for kind in self._kinds:
            cursor = np.zeros(DENSE_COUNTS, np.int64)
            current = np.zeros(DENSE_COUNTS, np.int64)
            starts = np.cumsum(kind.num_rows) - kind.num_rows
            is_dense = kind.counts < DENSE_COUNTS
            dense = kind.counts[is_dense]
            cursor[dense] = starts[is_dense]
            current[dense] = np.searchsorted(kind.stops, starts[is_dense], side="right")
            for table in kind.tables:
                out[table.name] = np.empty(table.num_rows, np.uint16)
                counts = self._profile.tables[table.name].accesses
                kernels.assign(counts, cursor, current, kind.stops, first, out[table.name])
            of_hot = first + np.searchsorted(
                kind.stops, np.arange(len(kind.hot_rows)), side="right"
            )
            for number, table in enumerate(kind.tables):
                in_table = kind.hot_tables == number
                out[table.name][kind.hot_rows[in_table]] = of_hot[in_table]
            first += len(kind.stops)
        return {table.name: out[table.name] for table in self.tables}

    def _runs(self, tables: list[TableSize]) -> _Kind:
        rows = np.zeros(DENSE_COUNTS, np.int64)
        batches = np.zeros(DENSE_COUNTS, np.int64)
        hot: list[tuple[Array, ...]] = []
        for number, table in enumerate(tables):
            counts = self._profile.tables[table.name]
            kernels.count_counts(counts.accesses, counts.batches, rows, batches)
            hot_rows = np.flatnonzero(counts.accesses >= DENSE_COUNTS)
            hot.append(
                (
                    np.full(len(hot_rows), number),
                    hot_rows,
                    counts.accesses[hot_rows],
                    counts.batches[hot_rows],
                )
            )
        number_, row, count, batch = (np.concatenate(arrays) for arrays in zip(*hot, strict=True))
        order = np.argsort(-count, kind="stable")
        dense = np.flatnonzero(rows)[::-1]
        return _Kind(
            tables,
            np.concatenate([count[order], dense]).astype(np.int64),
            np.concatenate([np.ones(len(order), np.int64), rows[dense]]),
            np.concatenate([batch[order], batches[dense]]).astype(np.float64),
            number_[order],
            row[order],
            np.empty(0, np.int64),
            np.empty((0, 3)),
        )

    def _partitions(self, parts: Sequence[tuple[_Kind, NDArray[np.bool_]]]) -> Partitions:
        profile = self._profile
        batch = self.batch_size
        sums = np.concatenate([kind.sums for kind, _ in parts])
        sizes = [np.full((len(kind.sums), 2), kind.tables[0].kind) for kind, _ in parts]
        weight_bytes, record_bytes = np.concatenate(sizes).T
        accesses = sums[:, 1] * (batch / max(1, profile.num_samples))
        share = sums[:, 2] / np.maximum(1, sums[:, 0] * profile.num_batches)
        exponent = batch / min(profile.batch_size, max(1, profile.num_samples))
        transfers = sums[:, 0] * (share if exponent == 1 else distinct(share, exponent))
        is_access_bound = np.concatenate([flags for _, flags in parts])
        return Partitions(
            sums[:, 0].astype(np.int64),
            accesses,
            np.minimum(transfers, accesses),
            weight_bytes,
            record_bytes,
            is_access_bound,
        )


def sizes_of(
    tables: Sequence[Table], optimizer: SparseOptimizer | Mapping[str, SparseOptimizer] | None
) -> list[TableSize]:
    """Sizes of tables that one optimizer trains, or one by name each (``""`` for those not named).

    None for inference.

    Raises:
        ConfigError: when a table has no optimizer.
    """
    if not isinstance(optimizer, Mapping):
        return [TableSize.of(table, optimizer) for table in tables]
    missing = [
        table.name for table in tables if table.name not in optimizer and "" not in optimizer
    ]
    if missing:
        raise ConfigError(
            f"table {missing[0]!r} without an optimizer", "one by its name, or under ''"
        )
    return [TableSize.of(table, optimizer.get(table.name, optimizer.get(""))) for table in tables]
