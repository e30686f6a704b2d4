"""When an id of a hashed table is given a row, and how ids without one are counted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np

from pibroch.errors import ConfigError
from pibroch.integers import whole_number
from pibroch.kernels import count_min, key_table
from pibroch.kernels.arrays import Array, Ints


@dataclass(frozen=True, slots=True)
class AfterCount:
    """An id is given a row in the step in which its count reaches a number.

    Attributes:
        count: it.
        sketch: count in four bytes for each row of the table, about: never too low, so that an id
            may be admitted early. Otherwise exactly, in some 32 bytes an id.
        candidates: ids without a row that are remembered, by default a fifth of the table's rows;
            of a sketch its width, by default as many as rows. The least recent half of them is
            forgotten when there are more; a sketch halves all its counts whenever it has counted a
            quarter of its width.
    """

    count: int = 1
    sketch: bool = False
    candidates: int | None = None

    name: ClassVar[str] = "after_count"

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", whole_number(self.count, "admission after count", 1))
        most = count_min.MOST if self.sketch else key_table.MOST_COUNT
        if self.count > most:
            raise ConfigError(
                f"admission after count {self.count}{' by a sketch' * self.sketch}",
                f"at most {most}",
            )
        if self.candidates is not None:
            number = whole_number(self.candidates, "candidates", 1)
            object.__setattr__(self, "candidates", number)

    def waiting(self, num_rows: int) -> WaitingIds:
        """What counts ids without a row of a table of so many."""
        if self.count == 1:
            return NobodyWaits()
        if self.sketch:
            return SketchedIds(self.count, self.candidates or max(1024, num_rows))
        return CountedIds(self.count, self.candidates or max(1024, num_rows // 5))

    def described(self) -> dict[str, Any]:
        """As checkpoints keep it."""
        return {"name": self.name, **asdict(self)}


class WaitingIds(ABC):
    """Ids without a row, and how often each was seen so far."""

    @property
    def num_ids(self) -> int:
        """That are remembered one by one."""
        return 0

    @property
    def num_bytes(self) -> int:
        """Of memory."""
        return 0

    @abstractmethod
    def add(self, ids: Ints, counts: Ints, step: int) -> Ints:
        """Count distinct ids that have no row, rising, in a step, int64 ``[N]`` all.

        Those whose count is reached wait no longer.

        Returns:
            How often each was seen so far.
        """

    @abstractmethod
    def copy(self) -> WaitingIds:
        """Another one that is now as this is."""

    @abstractmethod
    def state(self) -> dict[str, Array]:
        """Arrays by name, as they are; see :meth:`RowIndex.state`."""

    @abstractmethod
    def load_state(self, state: Mapping[str, Array]) -> None:
        """Take over a copy of what :meth:`state` gave."""


class NobodyWaits(WaitingIds):
    """Each id is given a row when it is first seen."""

    def add(self, ids: Ints, counts: Ints, step: int) -> Ints:
        """See :class:`WaitingIds`."""
        return counts

    def copy(self) -> WaitingIds:
        """See :class:`WaitingIds`."""
        return self

    def state(self) -> dict[str, Array]:
        """See :class:`WaitingIds`."""
        return {}

    def load_state(self, state: Mapping[str, Array]) -> None:
        """See :class:`WaitingIds`."""


class CountedIds(WaitingIds):
    """Counts exactly, a bounded number of ids.

    When a step brings more new ones than there is room for, the least recent half is forgotten, and
    more where that is not enough; ids of this step never, of which the greatest are not remembered
    where even then there is no room.

    Args:
        limit: count at which an id waits no longer.
        capacity: ids.
    """

    def __init__(self, limit: int, capacity: int) -> None:
        self._limit = limit
        self._capacity = capacity
        self._table = key_table.empty_table(capacity)

    @property
    def num_ids(self) -> int:
        """See :class:`WaitingIds`."""
        return int(self._table.counts[0])

    @property
    def num_bytes(self) -> int:
        """See :class:`WaitingIds`."""
        return sum(array.nbytes for array in self._table)

    def add(self, ids: Ints, counts: Ints, step: int) -> Ints:
        """See :class:`WaitingIds`."""
        table = self._table
        some = np.minimum(counts, key_table.MOST_COUNT).astype(np.int32)
        rows, missing = key_table.touch(table, ids, some, step)
        totals = counts.copy()
        known = np.flatnonzero(rows >= 0)
        totals[known] = table.entries[rows[known], 1] & 0xFFFFFFFF
        self._forget(rows[known[totals[known] >= self._limit]])
        new = missing[counts[missing] < self._limit]
        lacking = len(new) - (self._capacity - self.num_ids)
        if lacking > 0:
            self._forget(key_table.least(table, max(lacking, self._capacity // 2), step))
            new = new[: self._capacity - self.num_ids]
        key_table.insert(table, ids[new], counts[new], step, np.empty(len(new), np.int64))
        return totals

    def _forget(self, rows: Ints) -> None:
        key_table.remove(self._table, rows, np.empty(len(rows), np.int64))

    def copy(self) -> WaitingIds:
        """See :class:`WaitingIds`."""
        other = CountedIds.__new__(CountedIds)
        other._limit = self._limit
        other._capacity = self._capacity
        other._table = key_table.copy_of(self._table)
        return other

    def state(self) -> dict[str, Array]:
        """See :class:`WaitingIds`."""
        return {"candidates": self._table.entries}

    def load_state(self, state: Mapping[str, Array]) -> None:
        """See :class:`WaitingIds`."""
        self._table.entries[:] = state["candidates"]
        key_table.rebuild(self._table)


class SketchedIds(WaitingIds):
    """Counts about, any number of ids; old ones fade.

    Args:
        limit: count at which an id waits no longer.
        width: cells in each of the sketch's lines.
    """

    def __init__(self, limit: int, width: int) -> None:
        self._limit = limit
        self._cells = np.zeros((count_min.NUM_HASHES, width), np.uint8)
        self._num_counted = np.zeros(1, np.int64)

    @property
    def num_bytes(self) -> int:
        """See :class:`WaitingIds`."""
        return self._cells.nbytes

    def add(self, ids: Ints, counts: Ints, step: int) -> Ints:
        """See :class:`WaitingIds`."""
        totals = np.empty(len(ids), np.int64)
        count_min.add(self._cells, ids, counts, self._limit, totals)
        self._num_counted += counts[totals < self._limit].sum()
        if self._num_counted[0] * 4 >= self._cells.shape[1]:
            self._cells >>= 1
            self._num_counted[:] = 0
        return totals

    def copy(self) -> WaitingIds:
        """See :class:`WaitingIds`."""
        other = SketchedIds.__new__(SketchedIds)
        other._limit = self._limit
        other._cells = self._cells.copy()
        other._num_counted = self._num_counted.copy()
        return other

    def state(self) -> dict[str, Array]:
        """See :class:`WaitingIds`."""
        return {"sketch": self._cells, "sketch_counted": self._num_counted}

    def load_state(self, state: Mapping[str, Array]) -> None:
        """See :class:`WaitingIds`."""
        self._cells[:] = state["sketch"]
        self._num_counted[:] = state["sketch_counted"]
