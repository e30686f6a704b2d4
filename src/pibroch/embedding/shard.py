"""A shard that keeps its row records in this process's memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pibroch.embedding.initializers import stream_key
from pibroch.embedding.optimizers import SparseOptimizer
from pibroch.embedding.piece import Piece, PieceView
from pibroch.embedding.table import Table
from pibroch.kernels.arrays import Records
from pibroch.kernels.memory import empty_rows

ROWS_PER_FILL = 1 << 18


class MemoryShard:
    """Records of the rows of some pieces of one width, end to end.

    Attributes:
        pieces: in the order of their rows.
        dim: floats of weights in a record.
        fields: floats of each field of optimizer state, which follow the weights.
        records: float32 ``[num_rows, record_width]``.
        space: float32 ``[num_rows + spare_rows, record_width]``: the records, then room that takes no memory until used.
        touched: bool ``[num_rows + spare_rows]``, rows updated since it was cleared; ``None`` until :meth:`track_touched`.
    """

    def __init__(
        self, pieces: Sequence[Piece], dim: int, optimizer: SparseOptimizer, seed: int, spare_rows: int = 0
    ) -> None:
        self.pieces, self.dim = tuple(pieces), dim
        self.fields = optimizer.state_fields(dim)
        self._bounds = np.cumsum([0, *(len(piece.rows) for piece in pieces)]).tolist()
        self.space: Records = empty_rows(self._bounds[-1] + spare_rows, optimizer.record_width(dim))
        self.records = self.space[: self._bounds[-1]]
        self.touched: NDArray[np.bool_] | None = None
        for piece, first in zip(self.pieces, self._bounds, strict=False):
            self._initialise(piece, self.records[first : first + len(piece.rows), :dim], seed)
        first = dim + sum(optimizer.moments(dim).values())
        self.records[:, dim:first] = optimizer.initial_state()
        if optimizer.average is not None:
            self.records[:, first : first + dim] = self.records[:, :dim]
            self.records[:, first + dim] = 0

    @classmethod
    def whole(cls, tables: Sequence[Table], optimizer: SparseOptimizer, seed: int) -> MemoryShard:
        """All rows of all tables."""
        pieces = [Piece(table, range(table.num_rows), range(table.dim)) for table in tables]
        return cls(pieces, tables[0].dim, optimizer, seed)

    def _initialise(self, piece: Piece, weights: Records, seed: int) -> None:
        table, columns = piece.table, piece.columns
        initializer, key = table.resolved_initializer(), stream_key(seed, table.name)
        for start in range(0, len(weights), ROWS_PER_FILL):  # bounds what an initializer may allocate
            target, rows = weights[start : start + ROWS_PER_FILL], piece.rows[start : start + ROWS_PER_FILL]
            if len(columns) == table.dim:
                initializer.fill(target, rows, key)
            else:
                whole = np.empty((len(rows), table.dim), np.float32)
                initializer.fill(whole, rows, key)
                target[:] = whole[:, columns.start : columns.stop]

    @property
    def num_bytes(self) -> int:
        """Of all records: weights and optimizer state."""
        return int(self.records.nbytes)

    def track_touched(self) -> None:
        """Mark updated rows in ``touched`` from now on."""
        if self.touched is None:
            self.touched = np.zeros(len(self.space), np.bool_)

    def column(self, field: str) -> int:
        """First column of a state field in a record."""
        before = list(self.fields).index(field)
        return self.dim + sum(list(self.fields.values())[:before])

    def first_row(self, piece: int) -> int:
        """First row of a piece, by its place in ``pieces``."""
        return int(self._bounds[piece])

    def views(self) -> list[PieceView]:
        """The pieces with views of their numbers."""
        views = []
        for piece, first in zip(self.pieces, self._bounds, strict=False):
            here = slice(first, first + len(piece.rows))
            rows = self.records[here]
            touched = None if self.touched is None else self.touched[here]
            views.append(PieceView(piece, rows[:, : self.dim], self._fields_of(rows), touched))
        return views

    def weights(self, table: str) -> Records:
        """View of a table's weights as far as they are here, ``[rows, D]``; writing to it changes the table."""
        return self._rows_of(table)[:, : self.dim]

    def state(self, table: str) -> dict[str, Records]:
        """Views of a table's optimizer state by field, each ``[rows, floats]``."""
        return self._fields_of(self._rows_of(table))

    def _rows_of(self, table: str) -> Records:
        number = next(number for number, piece in enumerate(self.pieces) if piece.table.name == table)
        return self.records[self._bounds[number] : self._bounds[number + 1]]

    def _fields_of(self, rows: Records) -> dict[str, Records]:
        return {name: rows[:, self.column(name) : self.column(name) + width] for name, width in self.fields.items()}
