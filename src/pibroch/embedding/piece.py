"""The part of a table that a shard holds: some rows, some columns.

Whoever moves or saves rows works piece by piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from pibroch.embedding.row_set import RowSet
from pibroch.embedding.table import Table
from pibroch.kernels.arrays import Array


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows and columns of a table that lie together.

    Attributes:
        table: the whole table.
        rows: ids inside the table, rising, e.g. ``range(1, 1460, 2)``.
        columns: of its weights, e.g. ``range(0, 16)``.
        is_primary: whether this copy is the one to save; false for further replicas.
    """

    table: Table
    rows: RowSet
    columns: range
    is_primary: bool = True


class RowArray(Protocol):
    """Numbers of rows: an array in memory, or one that reads and writes where the rows are.

    ``numpy`` functions get a copy of the latter.
    """

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of an element."""

    @property
    def shape(self) -> tuple[int, ...]:
        """``[rows]`` or ``[rows, columns]``."""

    @property
    def ndim(self) -> int:
        """Number of dimensions."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any, /) -> Array: ...

    def __setitem__(self, chosen: Any, values: Any, /) -> None: ...

    def __array__(self) -> Array: ...

    def copy(self) -> Array:
        """All of it, in memory of its own."""


@dataclass(frozen=True, slots=True)
class PieceView:
    """The numbers of a piece; writing to the views changes the shard.

    Attributes:
        piece: which part of which table.
        weights: float32 ``[rows, columns]``.
        state: optimizer state by field, each ``[rows, floats]``: a field of a number for each
            column has the piece's columns, a field of one number a row has it whole.
        marks: by name bool ``[rows]``, set where a row was updated, see
            :class:`~pibroch.embedding.row_marks.RowMarks`.
    """

    piece: Piece
    weights: RowArray
    state: Mapping[str, RowArray]
    marks: Mapping[str, RowArray] = field(default_factory=dict)

    def mark(self, rows: slice | Array) -> None:
        """Say under all names that rows were written to."""
        for marks in self.marks.values():
            marks[rows] = True


class Shard(Protocol):
    """Row records in this process, or on a server, as those know them who save and move rows."""

    @property
    def pieces(self) -> Sequence[Piece]:
        """Which parts of which tables, in the order of their rows."""

    @property
    def num_bytes(self) -> int:
        """Of all records: weights and optimizer state."""

    def fill(self, seed: int) -> None:
        """Make all records what they are before the first update."""

    def views(self) -> list[PieceView]:
        """The pieces with their numbers."""

    def start_marks(self, name: str) -> None:
        """Mark updated rows under a name from now on, as if none had been updated before."""

    def mark_all(self, name: str) -> None:
        """As if all rows had been updated since the last cut of that name."""

    def cut(self, name: str, with_state: bool = True) -> Shard | None:
        """The rows updated since the last cut of that name, as they are now, or their weights.

        They stay so, whatever becomes of the shard's. ``None`` without memory for them.
        """

    def cut_in_place(self, name: str) -> list[PieceView] | None:
        """As :meth:`cut`, of rows in this process's memory without a copy: until the next step."""

    def end_cut(self, name: str, is_saved: bool) -> None:
        """The last cut of that name is not needed any more.

        Where it was not saved, its rows belong to the next one.
        """
