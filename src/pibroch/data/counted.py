"""Values and how often each occurs: codes of a vocabulary, or rows that are read.

A hashed table may have a hundred times as many rows as the data have ids: its counts take memory
and disk by the rows that are read.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pibroch.kernels.arrays import Array, Ints

DENSE_ROWS = 1 << 20  # tables up to this size, 8 MB, are counted in an array of all rows
_FEW_IDS = 1 << 16


class Counted(NamedTuple):
    """Distinct values, rising, and how often each occurs.

    Attributes:
        values: ``[N]``, uint64 of codes, int64 of rows.
        counts: int64 ``[N]``.
    """

    values: Array
    counts: Ints


def merged(parts: list[Counted], min_count: int = 1) -> Counted:
    """At least one part as one, the counts of equal values summed; rare values are left out."""
    values = np.concatenate([part.values for part in parts])
    counts = np.concatenate([part.counts for part in parts])
    if len(values) and len(parts) > 1:
        order = np.argsort(values, kind="stable")
        values = values[order]
        counts = counts[order]
        firsts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
        values = values[firsts]
        counts = np.add.reduceat(counts, firsts)
    kept = counts >= min_count
    return Counted(values[kept], counts[kept])


class RowCounts:
    """Counts how often each row of a table is read.

    Small tables are counted in an array of all rows. Of larger ones only the rows that are read are
    kept, until these are a quarter.

    Args:
        num_rows: of the table.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._all = np.zeros(num_rows, np.int64) if num_rows <= DENSE_ROWS else None
        self._parts = [Counted(np.empty(0, np.int64), np.empty(0, np.int64))]
        self._num_new = 0

    def add(self, rows: Array) -> None:
        """Count rows, integers ``[V]``, which may repeat."""
        if self._all is not None:
            np.add.at(self._all, rows, 1)
            return
        values, counts = np.unique(rows, return_counts=True)
        self._parts.append(Counted(values.astype(np.int64), counts))
        self._num_new += len(values)
        # merged when there are as many new ones as old ones, so that each is merged O(log N) times
        if self._num_new > max(_FEW_IDS, len(self._parts[0].values)):
            self._merge()

    def accessed(self) -> Counted:
        """The rows that are read."""
        self._merge()
        if self._all is None:
            return self._parts[0]
        rows = np.flatnonzero(self._all)
        return Counted(rows, self._all[rows])

    def _merge(self) -> None:
        if self._num_new:
            self._parts = [merged(self._parts)]
            self._num_new = 0
            if 4 * len(self._parts[0].values) > self.num_rows:
                self._all = all_counts(self._parts.pop(), self.num_rows)


def all_counts(accessed: Counted, num_rows: int) -> Ints:
    """Counts of all rows of a table, 0 for those that are never read, int64 ``[num_rows]``."""
    counts = np.zeros(num_rows, np.int64)
    counts[accessed.values] = accessed.counts
    return counts
