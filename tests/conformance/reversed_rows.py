"""A row index of one's own: the last id has the first row."""

from dataclasses import dataclass

from pibroch.embedding.row_index import IndexKind, RowIndex


class ReversedIndex(RowIndex):
    def rows_of(self, ids):
        return self.capacity - 1 - ids

    def ids_of(self, rows):
        return self.capacity - 1 - rows


@dataclass(frozen=True)
class Reversed(IndexKind):
    name = "reversed"

    def index(self, capacity):
        return ReversedIndex(capacity)
