"""Rows that begin anew with a batch, as tables of raw ids give them to other ids.

A row that changes its id has the record of the old one where it lies, until the step of the batch
begins. So whoever reads the row for the batch shows its initial weights in place of what is there,
and whoever updates it first writes the initial record. Nothing travels for it: initial weights
follow from seed, table and id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pibroch.data.batch import FreshRows
from pibroch.embedding import MemoryShard, Piece, SparseOptimizer, Table, TableGroup
from pibroch.embedding.row_set import ListedRows
from pibroch.embedding.rows import read_rows
from pibroch.kernels.arrays import Ints, Records


@dataclass(frozen=True, slots=True)
class FreshRecords:
    """Some rows of one lane, and the records with which they begin.

    Attributes:
        rows: int64 ``[N]``, rising: addresses, or numbers in a shard.
        places: of their records in ``shard``, int64 ``[N]``.
        shard: has these records.
        optimizer: of the rows.
    """

    rows: Ints
    places: Ints
    shard: MemoryShard
    optimizer: SparseOptimizer

    def records(self) -> Records:
        """All records, ``[N, record_width]``."""
        return self.shard.space[self.places]

    def within(self, first: int, stop: int) -> FreshRecords:
        """Those of a span of addresses, as numbers in it."""
        begin, end = np.searchsorted(self.rows, [first, stop])
        return replace(self, rows=self.rows[begin:end] - first, places=self.places[begin:end])

    def show(self, rows: Ints, weights: Records) -> None:
        """Write the initial weights of those of ``rows`` ``[U]`` that are fresh to ``weights``.

        Float32 ``[U, D]``; rows may come in any order.
        """
        here, found = self._find(rows)
        if len(here):
            weights[here] = read_rows(self.shard, self.optimizer, self.places[found], None)

    def write(self, space: Records, rows: Ints, places: Ints) -> Ints:
        """Write the initial records of those of ``rows`` ``[U]`` that are fresh.

        Args:
            space: float32 ``[., record_width]``.
            rows: addresses, or numbers in a shard, in any order.
            places: of their records in ``space``.

        Returns:
            The places that were written.
        """
        here, found = self._find(rows)
        written: Ints = places[here]
        space[written] = self.shard.space[self.places[found]]
        return written

    def begin(self, shard: MemoryShard) -> None:
        """Write all initial records to a shard that holds the rows."""
        if len(self.rows):
            shard.space[self.rows] = self.records()
            shard.mark(self.rows)

    def _find(self, rows: Ints) -> tuple[Ints, Ints]:
        """Which of ``rows`` are fresh, and their numbers among the fresh ones."""
        if not len(self.rows):
            return self.rows, self.rows
        number = np.minimum(np.searchsorted(self.rows, rows), len(self.rows) - 1)
        here = np.flatnonzero(self.rows[number] == rows)
        return here, number[here]


def fresh_records(
    fresh: FreshRows | None,
    columns_of_table: Sequence[tuple[Table, range]],
    optimizer: SparseOptimizer,
    addresses_of: Sequence[Ints],
) -> FreshRecords | None:
    """The records of fresh rows of some tables; ``None`` where there are none.

    Args:
        fresh: rows of a batch.
        columns_of_table: tables of one width and type, and which of their columns are held.
        optimizer: of these.
        addresses_of: of each table's fresh rows, int64.
    """
    if fresh is None or not any(map(len, addresses_of)):
        return None
    pieces = [
        Piece(table, ListedRows.of(fresh.ids[table.name]), columns)
        for (table, columns), rows in zip(columns_of_table, addresses_of, strict=True)
        if len(rows)
    ]
    table = pieces[0].table
    width = len(pieces[0].columns)
    shard = MemoryShard(pieces, width, optimizer, fresh.seed, dtype=table.dtype)
    addresses = np.concatenate(addresses_of)
    places = np.argsort(addresses)
    return FreshRecords(addresses[places], places, shard, optimizer)


def fresh_in_space(fresh: FreshRows | None, tables: TableGroup) -> FreshRecords | None:
    """The records of fresh rows of a group of tables, by their rows in its row space."""
    if fresh is None:
        return None
    space = tables.space
    learning = [table for table in space.tables if table.name in fresh.rows]
    return fresh_records(
        fresh,
        [(table, range(table.dim)) for table in learning],
        tables.optimizer,
        [space.first_row[table.name] + fresh.rows[table.name] for table in learning],
    )


def fresh_bags(fresh: FreshRows, tables: Sequence[str]) -> tuple[Ints, Ints]:
    """The fresh rows of some tables one after the other, and their offsets, as bags have them.

    Args:
        fresh: rows.
        tables: by name, ``""`` for none.
    """
    nothing = np.empty(0, np.int64)
    bags = [fresh.rows.get(table, nothing) for table in tables]
    return np.concatenate([nothing, *bags]), np.cumsum([0, *map(len, bags)])
