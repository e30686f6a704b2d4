"""Which rows of a table lie together: evenly spaced ones, or any that a plan chose."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import overload

import numpy as np

from pibroch.kernels.arrays import Ints


class ListedRows:
    """Any rows of a table, rising; their ids come into being when somebody asks for them.

    Args:
        count: how many.
        make: gives the ids, int64 ``[count]``, rising.
    """

    def __init__(self, count: int, make: Callable[[], Ints]) -> None:
        self._count = count
        self._make = make

    @classmethod
    def of(cls, ids: Ints) -> ListedRows:
        """Of ids that are there already."""
        return cls(len(ids), lambda: ids)

    @cached_property
    def ids(self) -> Ints:
        """Int64 ``[count]``."""
        ids = self._make()
        assert len(ids) == self._count, "as many as were promised"
        return ids

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> ListedRows: ...

    def __getitem__(self, place: int | slice) -> int | ListedRows:
        return ListedRows.of(self.ids[place]) if isinstance(place, slice) else int(self.ids[place])

    def __reduce__(self) -> tuple[Callable[[Ints], ListedRows], tuple[Ints]]:
        return ListedRows.of, (self.ids,)

    def __repr__(self) -> str:
        return f"ListedRows({self._count})"


RowSet = range | ListedRows
"""Rising ids of rows inside a table."""


def ids_of(rows: RowSet, some: slice = slice(None)) -> Ints:
    """The ids, int64, of those at ``some`` places.

    >>> ids_of(range(1, 100, 4), slice(2, 4)).tolist()
    [9, 13]
    """
    if isinstance(rows, ListedRows):
        return rows.ids[some]
    chosen = rows[some]
    return np.arange(chosen.start, chosen.stop, chosen.step, dtype=np.int64)


def ids_at(rows: RowSet, places: Ints) -> Ints:
    """The ids of the rows at some places.

    >>> ids_at(range(1, 100, 4), np.array([2, 0])).tolist()
    [9, 1]
    """
    return rows.ids[places] if isinstance(rows, ListedRows) else rows.start + rows.step * places


def places_of(rows: RowSet, ids: Ints) -> Ints:
    """For each of some ids its place among the rows, -1 for one that is not there.

    >>> places_of(range(1, 100, 4), np.array([9, 10, 1])).tolist()
    [2, -1, 0]
    >>> places_of(ListedRows.of(np.array([3, 9, 10])), np.array([9, 4, 10, 11])).tolist()
    [1, -1, 2, -1]
    """
    if isinstance(rows, ListedRows):
        places = np.searchsorted(rows.ids, ids)
        places[places == len(rows)] = 0
        is_here = rows.ids[places] == ids if len(rows) else np.zeros(len(ids), np.bool_)
    else:
        places, rest = np.divmod(ids - rows.start, rows.step)
        is_here = (rest == 0) & (places >= 0) & (places < len(rows))
    return np.where(is_here, places, -1)


def those_within(rows: RowSet, block: range) -> Ints:
    """The ids that lie in a block of consecutive rows.

    >>> those_within(range(1, 100, 4), range(5, 14)).tolist()
    [5, 9, 13]
    """
    if isinstance(rows, ListedRows):
        first, after = np.searchsorted(rows.ids, [block.start, block.stop])
        return rows.ids[first:after]
    first, after = (
        min(len(rows), max(0, -(-(end - rows.start) // rows.step)))
        for end in (block.start, block.stop)
    )
    return ids_of(rows, slice(first, after))


def common(left: range, right: range) -> range:
    """The numbers that lie in both of two rising ranges.

    >>> common(range(1, 100, 4), range(0, 50, 6))
    range(0, 0)
    >>> list(common(range(1, 100, 4), range(3, 50, 6)))
    [9, 21, 33, 45]
    """
    skipped = max(0, -(-(right.start - left.start) // left.step))
    first = next(
        (number for number in left[skipped : skipped + right.step] if number in right), None
    )
    if first is None:
        return range(0)
    return range(first, min(left.stop, right.stop), math.lcm(left.step, right.step))


def places(some: range, whole: range) -> range:
    """Positions in ``whole`` of numbers that all lie in it.

    >>> places(range(9, 50, 12), range(1, 100, 4))
    range(2, 12, 3)
    """
    start = whole.index(some[0])
    step = some.step // whole.step
    return range(start, start + (len(some) - 1) * step + 1, step)


def as_slice(rows: range) -> slice:
    """A rising range, as arrays take it."""
    return slice(rows.start, rows.stop, rows.step)
