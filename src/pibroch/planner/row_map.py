"""Where a plan puts single rows.

A partition and a number for each of them, 6 bytes a row, and where partitions lie.

N rows of all tables, laid end to end; P partitions; S shards. A **place** is a shard, or ``S`` for
"everywhere".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from pibroch.embedding.row_set import ListedRows
from pibroch.errors import ConfigError
from pibroch.kernels.arrays import Ints
from pibroch.planner.assignment import Assignment
from pibroch.planner.kernels import row_map as numbering


@dataclass(frozen=True)
class RowMap:
    """Homes and copies of the rows of some tables.

    Several processes of a host share the memory of one that lies in a file.

    Attributes:
        num_rows: of each table by name, in the order in which they lie.
        partition: uint16 ``[N]``.
        index: uint32 ``[N]``: a row's number among those of its table at its place.
        home: uint16 ``[P]``, the shard that owns a partition's rows.
        copies: bool ``[P, S]``, other shards that have copies of them.
        source: uint16 ``[P, S]``: the shard from which each reads a partition where only some have
            copies; ``None`` for the rule of :func:`pibroch.planner.cost.sources`.
    """

    num_rows: Mapping[str, int]
    partition: NDArray[np.uint16]
    index: NDArray[np.uint32]
    home: NDArray[np.uint16]
    copies: NDArray[np.bool_]
    source: NDArray[np.uint16] | None = None

    @classmethod
    def of(cls, assignment: Assignment) -> Self:
        """Number the rows of an assignment.

        Raises:
            ConfigError: for a partition without a home, or a home that is no shard.
        """
        num_rows = {table: len(partitions) for table, partitions in assignment.partition_of.items()}
        partition = np.concatenate([np.zeros(0, np.uint16), *assignment.partition_of.values()])
        row_map = cls(
            num_rows,
            partition,
            np.empty(len(partition), np.uint32),
            assignment.home,
            assignment.copies,
            assignment.source,
        )
        row_map._count(numbering.number_rows)
        return row_map

    def check(self) -> None:
        """Look at all numbers, which may come from a damaged file.

        Raises:
            ConfigError: for numbers that cannot be.
        """
        _ = self.counts

    @property
    def assignment(self) -> Assignment:
        """What was decided, in views."""
        rows = {table: self.partition[self.rows_of(table)] for table in self.num_rows}
        return Assignment(rows, self.home, self.copies, self.source)

    @property
    def num_shards(self) -> int:
        """S."""
        return int(self.copies.shape[1])

    @cached_property
    def place_of(self) -> Ints:
        """The place of each partition, ``[P]``: its home, unless every shard has it.

        Copies on some shards make an address depend on who reads, and are for retrieval alone;
        those who train read at home.
        """
        everywhere = Assignment({}, self.home, self.copies).is_everywhere
        return np.where(everywhere, self.num_shards, self.home).astype(np.int64)

    def first_row(self, table: str) -> int:
        """A table's first row."""
        names = list(self.num_rows)
        return sum(self.num_rows[name] for name in names[: names.index(table)])

    def rows_of(self, table: str) -> slice:
        """A table's rows."""
        first = self.first_row(table)
        return slice(first, first + self.num_rows[table])

    @cached_property
    def counts(self) -> dict[str, Ints]:
        """Rows of each table at each place, ``[S + 1]``."""
        return self._count(numbering.check_numbers)

    def rows_at(self, table: str, place: int) -> ListedRows:
        """The rows of a table that lie at a place."""
        count = int(self.counts[table][place])
        partition = self.partition[self.rows_of(table)]

        def make() -> Ints:
            ids = np.empty(count, np.int64)
            numbering.rows_at(partition, self.place_of, place, ids)
            return ids

        return ListedRows(count, make)

    def _count(self, visit: Callable[..., int]) -> dict[str, Ints]:
        """Number, or check the numbers of, all tables' rows; returns :attr:`counts`."""
        if self.home.shape != self.copies.shape[:1] or (self.home >= self.num_shards).any():
            raise ConfigError(
                f"homes {sorted(set(self.home.tolist()))[-1:]} of {len(self.copies)} partitions",
                f"one of the shards 0 to {self.num_shards - 1} for each",
            )
        counts_of = {}
        for table in self.num_rows:
            here = self.rows_of(table)
            counts = np.zeros(self.num_shards + 1, np.int64)
            bad = visit(self.partition[here], self.place_of, counts, self.index[here])
            if bad >= 0:
                raise ConfigError(
                    f"row {bad} of table {table!r} in partition {self.partition[here][bad]}, number"
                    f" {self.index[here][bad]}",
                    f"one of {len(self.home)} partitions, and the number that the rows before it"
                    " leave",
                    "make the plan anew",
                )
            counts_of[table] = counts
        return counts_of
