"""A shard that keeps its row records in this process's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pibroch.embedding.chosen_rows import ChosenRows
from pibroch.embedding.dtype import Dtype, weight_floats
from pibroch.embedding.initializers import stream_key
from pibroch.embedding.narrow_rows import NarrowRows
from pibroch.embedding.optimizers import SparseOptimizer
from pibroch.embedding.piece import Piece, PieceView, RowArray
from pibroch.embedding.row_marks import RowMarks
from pibroch.embedding.row_set import ListedRows, ids_at, ids_of
from pibroch.embedding.table import Table
from pibroch.errors import ConfigError
from pibroch.kernels import route as routing
from pibroch.kernels.arrays import Ints, Records, Stored
from pibroch.kernels.memory import empty_rows
from pibroch.observability.memory import free_memory, most_that_fits

ROWS_PER_FILL = 1 << 18
SMALL_BYTES = 1 << 24
"""Up to so much is taken without asking how much is free."""
UNTOUCHED, MOVED, UPDATED = range(3)
"""Of a row that is to have another home: nothing happened to it yet; it is there as it is here.

It was updated since.
"""
MakeRoom = Callable[[int, int], Records]
"""Makes float32 ``[rows, floats]`` that begins with a cache line; what is in it does not matter."""

_made_by: MakeRoom | None = None


@contextmanager
def rows_made_by(make_room: MakeRoom) -> Iterator[None]:
    """Within, all shards have their records in such memory, however much there is."""
    global _made_by
    _made_by = make_room
    try:
        yield
    finally:
        _made_by = None


def _space(
    pieces: Sequence[Piece], num_rows: int, spare_rows: int, width: int, make_room: MakeRoom
) -> Records:
    """Memory for a shard, refused where the machine has not enough.

    Linux would give it, and end the process that uses it.
    """
    if _made_by is not None:
        return _made_by(num_rows + spare_rows, width)
    num_bytes = num_rows * width * 4
    most = None if num_bytes < SMALL_BYTES else most_that_fits()
    if most is None or num_bytes <= most:
        try:
            return make_room(num_rows + spare_rows, width)
        except (MemoryError, OSError, OverflowError, ValueError) as error:
            raise _without_room(pieces, num_rows + spare_rows, width, str(error)) from error
    raise _without_room(pieces, num_rows, width, f"with {most / 1e9:.1f} GB free")


def _without_room(pieces: Sequence[Piece], num_rows: int, width: int, why: str) -> ConfigError:
    tables = list(dict.fromkeys(piece.table.name for piece in pieces))
    named = ", ".join(tables[:3]) + (f" and {len(tables) - 3} more" if len(tables) > 3 else "")
    return ConfigError(
        f"{num_rows:,} rows of {width * 4} bytes (weights and optimizer state) of {named} "
        f"in one process, {why}",
        f"{num_rows * width * 4 / 1e9:.1f} GB of memory",
        "spread them over more ranks or embedding servers (on more machines), or make them "
        "smaller: fewer rows, a smaller dim, bfloat16 weights, an optimizer with less state",
    )


class MemoryShard:
    """Records of the rows of some pieces of one width and type, end to end in memory.

    Without a ``seed`` they are left to who writes them, or calls :meth:`fill`.

    Raises:
        ConfigError: for more records than memory has room for.

    Attributes:
        pieces: in the order of their rows.
        dim: weights in a record.
        dtype: of the weights; two bfloat16 lie in one float of the record.
        fields: floats of each field of optimizer state, which follow the weights.
        records: float32 ``[num_rows, record_width]``.
        space: float32 ``[num_rows + spare_rows, record_width]``: the records, then room that takes
            no memory until used.
        stored, stored_space: the same in the type of the weights, see
            :data:`pibroch.kernels.arrays.Stored`: what kernels read.
        progress: uint8 ``[num_rows]``, of rows on their way to other homes, see :data:`UNTOUCHED`;
            ``None`` where they stay.
        marks: of updated rows, by name.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        dim: int,
        optimizer: SparseOptimizer,
        seed: int | None,
        spare_rows: int = 0,
        dtype: Dtype = "float32",
        make_room: MakeRoom = empty_rows,
    ) -> None:
        self.pieces = tuple(pieces)
        self.dim = dim
        self.dtype = dtype
        self.fields = optimizer.state_fields(dim)
        self._width = weight_floats(dim, dtype)
        self._bounds = np.cumsum([0, *(len(piece.rows) for piece in pieces)]).tolist()
        width = optimizer.record_width(dim, dtype)
        self._hold(_space(pieces, self._bounds[-1], spare_rows, width, make_room))
        self.marks = RowMarks(len(self.records), len(self.space))
        self.progress: NDArray[np.uint8] | None = None
        if self.dtype != "float32":
            self.stored[:, dim : 2 * self._width] = 0  # the half that an odd dim leaves
        self._optimizer = optimizer
        if seed is not None:
            self.fill(seed)

    def _hold(self, space: Records) -> None:
        """Have records and spare rows there."""
        self.space: Records = space
        self.stored_space: Stored = space if self.dtype == "float32" else space.view(np.uint16)
        num_rows = self._bounds[-1]
        self.records = self.space[:num_rows]
        self.stored = self.stored_space[:num_rows]

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and ``copy.deepcopy``: records once, as a tensor for ``torch.save``."""
        state = self.__dict__.copy()
        num_spare = len(self.space) - len(self.records)
        for name in ("space", "stored_space", "records", "stored"):
            del state[name]
        return state | {"held": torch.from_numpy(self.records), "num_spare": num_spare}

    def __setstate__(self, state: dict[str, Any]) -> None:
        held = state.pop("held").numpy()
        num_spare = state.pop("num_spare")
        self.__dict__.update(state)
        self._hold(empty_rows(len(held) + num_spare, held.shape[1]))
        self.records[:] = held

    def fill(self, seed: int) -> None:
        """Make all records what they are before the first update. Time grows with all rows."""
        dim = self.dim
        optimizer = self._optimizer
        for piece, first in zip(self.pieces, self._bounds, strict=False):
            self._initialise(piece, self._weights_in(slice(first, first + len(piece.rows))), seed)
        end = self._width + sum(optimizer.moments(dim).values())
        self.records[:, self._width : end] = optimizer.initial_state()
        if optimizer.average is not None:
            for start in range(0, len(self.records), ROWS_PER_FILL):
                some = slice(start, start + ROWS_PER_FILL)
                self.records[some, end : end + dim] = self._weights_in(some)[:]
            self.records[:, end + dim] = 0

    @classmethod
    def whole(
        cls, tables: Sequence[Table], optimizer: SparseOptimizer, seed: int | None
    ) -> MemoryShard:
        """All rows of all tables."""
        pieces = [Piece(table, range(table.num_rows), range(table.dim)) for table in tables]
        return cls(pieces, tables[0].dim, optimizer, seed, dtype=tables[0].dtype)

    def _initialise(self, piece: Piece, weights: RowArray, seed: int) -> None:
        table = piece.table
        columns = piece.columns
        initializer = table.resolved_initializer()
        key = stream_key(seed, table.name)
        in_place = len(columns) == table.dim and self.dtype == "float32"
        step = ROWS_PER_FILL if in_place else ROWS_PER_FILL // 16  # bounds what is allocated
        for start in range(0, len(weights), step):
            some = slice(start, start + step)
            rows = ids_of(piece.rows, some)
            if in_place:
                initializer.fill(weights[some], rows, key)
            else:
                whole = np.empty((len(rows), table.dim), np.float32)
                initializer.fill(whole, rows, key)
                weights[some] = whole[:, columns.start : columns.stop]

    @property
    def num_bytes(self) -> int:
        """Of all records: weights and optimizer state."""
        return int(self.records.nbytes)

    def mark(self, rows: Ints) -> None:
        """Say that rows were updated."""
        self.marks.mark(rows)
        if self.progress is not None:
            self.progress[rows] = UPDATED

    def start_marks(self, name: str) -> None:
        """Mark updated rows under a name from now on, as if none had been updated before."""
        self.marks.start(name)

    def mark_all(self, name: str) -> None:
        """As if all rows had been updated since the last cut of that name."""
        self.marks.set_all(name)

    def cut(self, name: str, with_state: bool = True) -> MemoryShard | None:
        """A copy of the rows that were updated since the last cut of that name, as a shard.

        Their marks are cleared. Time and memory grow with these rows (and by a byte a row with
        all). ``None``, and all as it was, where the copy would take more than half of the memory
        that is free. :meth:`end_cut` says when the copy is not needed any more.

        Args:
            name: of the marks.
            with_state: whether the copy has optimizer state, and not weights alone.
        """
        rows = self.marks.rows(name)
        width = self.space.shape[1] if with_state else self._width
        if rows.size * width * 4 > free_memory() // 2:
            return None
        self.marks.cut(name, rows)
        return self._copy_of(rows, width)

    def cut_in_place(self, name: str) -> list[PieceView]:
        """As :meth:`cut`, without a copy: the rows where they are, until they are updated again."""
        rows = self.marks.rows(name)
        self.marks.cut(name, rows)
        views = []
        for view, first in zip(self.views(), self._bounds, strict=False):
            begin, end = np.searchsorted(rows, [first, first + len(view.piece.rows)])
            own = rows[begin:end] - first
            piece = replace(view.piece, rows=ListedRows.of(ids_at(view.piece.rows, own)))
            state = {field: ChosenRows(array, own) for field, array in view.state.items()}
            views.append(PieceView(piece, ChosenRows(view.weights, own), state))
        return views

    def end_cut(self, name: str, is_saved: bool) -> None:
        """The last cut of that name was saved, or its rows count as updated since the one before.

        Nothing where there is none.
        """
        self.marks.end_cut(name, is_saved)

    def _copy_of(self, rows: Ints, width: int) -> MemoryShard:
        """The first floats of some rows, rising, as a shard of its own: all, or their weights."""
        other = MemoryShard.__new__(MemoryShard)
        other.__dict__.update(self.__dict__)
        bounds = np.searchsorted(rows, self._bounds).tolist()
        other.pieces = tuple(
            replace(piece, rows=ListedRows.of(ids_at(piece.rows, rows[begin:end] - first)))
            for piece, first, (begin, end) in zip(
                self.pieces, self._bounds, pairwise(bounds), strict=False
            )
        )
        other._bounds = bounds
        other.marks = RowMarks(len(rows), len(rows))
        if width == self._width:
            other.fields = {}
        space = np.empty((len(rows), width), np.float32)
        routing.gather_rows(self.space, rows, space)
        other._hold(space)
        return other

    def column(self, field: str) -> int:
        """First column of a state field in a record."""
        before = list(self.fields).index(field)
        return self._width + sum(list(self.fields.values())[:before])

    def first_row(self, piece: int) -> int:
        """First row of a piece, by its place in ``pieces``."""
        return int(self._bounds[piece])

    def first_columns(self, rows: Ints) -> NDArray[np.int32]:
        """Of each of some rows, the table's column with which its weights begin.

        Empty where all begin at 0.
        """
        firsts = np.array([piece.columns.start for piece in self.pieces], np.int32)
        if not firsts.any():
            return firsts[:0]
        return firsts[np.searchsorted(self._bounds, rows, side="right") - 1]

    def views(self) -> list[PieceView]:
        """The pieces with views of their numbers."""
        views = []
        for piece, first in zip(self.pieces, self._bounds, strict=False):
            here = slice(first, first + len(piece.rows))
            marks = {name: self.marks.of(name)[here] for name in self.marks.names}
            views.append(PieceView(piece, self._weights_in(here), self._fields_in(here), marks))
        return views

    def weights(self, table: str) -> RowArray:
        """A table's weights as far as they are here, ``[rows, D]``.

        Writing to them changes the table.
        """
        return self._weights_in(self._rows_of(table))

    def state(self, table: str) -> dict[str, Records]:
        """Views of a table's optimizer state by field, each ``[rows, floats]``."""
        return self._fields_in(self._rows_of(table))

    def array(self, field: str) -> RowArray:
        """Of all rows, a field of optimizer state, or the weights by the name ``""``."""
        everything = slice(0, len(self.records))
        return self._fields_in(everything)[field] if field else self._weights_in(everything)

    def _rows_of(self, table: str) -> slice:
        number = next(
            number for number, piece in enumerate(self.pieces) if piece.table.name == table
        )
        return slice(self._bounds[number], self._bounds[number + 1])

    def _weights_in(self, rows: slice) -> RowArray:
        """A view, or what reads and writes float32 through to bfloat16."""
        if self.dtype == "float32":
            return self.records[rows, : self.dim]
        return NarrowRows(self.stored[rows, : self.dim].view(np.uint16))

    def _fields_in(self, rows: slice) -> dict[str, Records]:
        records = self.records[rows]
        return {
            name: records[:, self.column(name) : self.column(name) + width]
            for name, width in self.fields.items()
        }
