"""What the table of keys means: a dictionary, and a set of free rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Entry:
    """Of a key: its row, and when and how often it was seen."""

    row: int
    last: int
    count: int


class RowOf:
    """Rows of keys.

    Example:
        >>> rows = RowOf(3)
        >>> rows.insert([700, -5], [1, 1], step=1), rows.touch([-5, 8, -5], [1, 1, 2], step=2)
        ([0, 1], [1, None, 1])
        >>> rows.entries[-5], rows.least(1, 3, lambda entry: entry.last)
        (Entry(row=1, last=2, count=4), [0])
    """

    def __init__(self, num_rows: int) -> None:
        self.entries: dict[int, Entry] = {}
        self.free = set(range(num_rows))

    def find(self, keys: Iterable[int]) -> list[int | None]:
        """The row of each key."""
        return [self.entries[key].row if key in self.entries else None for key in keys]

    def touch(
        self, keys: Sequence[int], counts: Sequence[int], step: int, half_life: int = 0
    ) -> list[int | None]:
        """As :meth:`find`, and note that they were seen."""
        for key, count in zip(keys, counts, strict=True):
            if key in self.entries:
                entry = self.entries[key]
                entry.count = decayed(entry, step, half_life) + count
                entry.last = step
        return self.find(keys)

    def insert(self, keys: Sequence[int], counts: Sequence[int], step: int) -> list[int]:
        """Give keys that are absent the lowest free rows."""
        rows = sorted(self.free)[: len(keys)]
        self.free -= set(rows)
        self.entries |= {
            key: Entry(row, step, count) for key, row, count in zip(keys, rows, counts, strict=True)
        }
        return rows

    def remove(self, rows: Iterable[int]) -> None:
        """Free rows in use."""
        for row in rows:
            del self.entries[self.key_of(row)]
            self.free.add(row)

    def key_of(self, row: int) -> int:
        """Of a row in use."""
        return next(key for key, entry in self.entries.items() if entry.row == row)

    def least(self, num: int, step: int, score: Callable[[Entry], int]) -> list[int]:
        """The rows of the least by (score, key) among those not seen in this step, rising."""
        some = [
            (score(entry), key, entry.row)
            for key, entry in self.entries.items()
            if entry.last != step
        ]
        return sorted(row for _, _, row in sorted(some)[:num])


def decayed(entry: Entry, step: int, half_life: int) -> int:
    """The count of an entry, halved at each multiple of ``half_life`` steps since; 0 for never."""
    halvings = step // half_life - entry.last // half_life if half_life else 0
    return entry.count >> halvings
