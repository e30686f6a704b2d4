"""What changes from one plan to another: rows that move, copies that come and go, predictions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pibroch.errors import DataError
from pibroch.planner.assignment import Assignment
from pibroch.planner.cost import holders


@dataclass(frozen=True, slots=True)
class TableDiff:
    """Changes to one table.

    Attributes:
        num_rows: of the table.
        moved: rows whose home changes.
        copies_added: of rows, on shards that did not hold them.
        copies_dropped: of rows, on shards that hold them no longer.
    """

    num_rows: int
    moved: int
    copies_added: int
    copies_dropped: int


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """Changes by table, and rows to send.

    ``rows_sent[i, j]`` that j needs and i, their old home, has.
    """

    tables: dict[str, TableDiff]
    rows_sent: NDArray[np.int64]

    @property
    def moved(self) -> int:
        """Rows of all tables whose home changes."""
        return sum(table.moved for table in self.tables.values())


def diff(old: Assignment, new: Assignment) -> PlanDiff:
    """Compare two plans of the same tables; O(rows), with a histogram over pairs of partitions.

    Raises:
        DataError: when they are not for the same tables and as many shards.
    """
    sizes = [{name: len(rows) for name, rows in plan.partition_of.items()} for plan in (old, new)]
    if sizes[0] != sizes[1] or old.num_shards != new.num_shards:
        odd = sorted(set(sizes[0].items()) ^ set(sizes[1].items()))[:1]
        got = (
            f"plans that differ in table {odd[0][0]!r}"
            if odd
            else f"{old.num_shards} and {new.num_shards} shards"
        )
        raise DataError(got, "plans for the same tables and as many shards", "compare other plans")
    held = [holders(plan.home, plan.copies) for plan in (old, new)]
    tables = {}
    sent = np.zeros((old.num_shards, old.num_shards), np.int64)
    for name, rows in old.partition_of.items():
        pairs, counts = np.unique(
            rows.astype(np.uint32) << 16 | new.partition_of[name], return_counts=True
        )
        before = pairs >> 16
        after = pairs & 0xFFFF
        fresh = held[1][after] & ~held[0][before]
        gone = held[0][before] & ~held[1][after]
        moved = old.home[before] != new.home[after]
        tables[name] = TableDiff(
            len(rows),
            int(counts[moved].sum()),
            int(counts @ fresh.sum(axis=1)),
            int(counts @ gone.sum(axis=1)),
        )
        for shard in range(old.num_shards):
            sent[shard] += (counts[:, None] * fresh)[old.home[before] == shard].sum(axis=0)
    return PlanDiff(tables, sent)
