"""Tables on disk, in as many parts as they lie in pieces.

A checkpoint knows nothing of plans, shards or ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import quote

import numpy as np

from pibroch.embedding.groups import Optimizers, optimizers_of
from pibroch.embedding.initializers import Zeros
from pibroch.embedding.optimizers import SGD
from pibroch.embedding.piece import Piece, PieceView
from pibroch.embedding.row_index import Identity
from pibroch.embedding.row_set import ListedRows
from pibroch.embedding.rows import read_rows
from pibroch.embedding.shard import MemoryShard
from pibroch.embedding.table import Table
from pibroch.errors import CheckpointError
from pibroch.state.parts import WEIGHT, SavedPart, WrittenPart, mark_listed, read_part, write_piece

FOLDER = "tables"
MIN_ITEM_BYTES = 2
"""Of a weight in a file."""
AVERAGING_BYTES = 256 << 20
"""Of weights with what their averages need, while averages are worked out."""
_MOST = 1 << 48


@dataclass(frozen=True, slots=True)
class SavedTable:
    """A table in a checkpoint.

    Attributes:
        num_rows: of the whole table.
        dim: columns of its weights.
        state: floats in a row of each field of optimizer state; as many as ``dim`` means one for
            each column.
        parts: what was written, later ones over earlier ones.
        index: the kind of its row index with its settings; ``None`` where ids are rows.
    """

    num_rows: int
    dim: int
    state: Mapping[str, int]
    parts: tuple[SavedPart, ...] = ()
    index: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not (0 < self.num_rows < _MOST and 0 < self.dim < _MOST):
            raise ValueError("a table of at least one row and column, below 2^48")
        if any(not 0 <= width < _MOST for width in self.state.values()):
            raise ValueError("optimizer state of at least 0 floats a row")
        for part in self.parts:
            first, after = part.columns
            if not 0 <= first < after <= self.dim:
                raise ValueError(f"columns within 0 to {self.dim}, not {first} to {after}")
            start, stop, step = part.rows or (0, self.num_rows, 1)
            if not (0 <= start <= stop <= self.num_rows and step >= 1):
                raise ValueError(f"rows within 0 to {self.num_rows}, not {start}:{stop}:{step}")

    def __str__(self) -> str:
        fields = ", ".join(f"{name}[{width}]" for name, width in self.state.items()) or "none"
        index = "" if self.index is None else f" and row index {dict(self.index)}"
        return f"{self.num_rows} rows x {self.dim} with optimizer state {fields}{index}"

    @property
    def num_cells(self) -> int:
        """Weights in it."""
        return self.num_rows * self.dim

    @property
    def by_columns(self) -> set[str]:
        """Tensors with a float for each column of the weights."""
        return {WEIGHT, *(field for field, width in self.state.items() if width == self.dim)}


class Extent(NamedTuple):
    """Which part of which table, in plain values that can be sent."""

    table: str
    rows: tuple[int, int, int]
    columns: tuple[int, int]
    num_listed: int = 0
    """Of rows that a plan chose; ``rows`` then goes from the first to behind the last of them."""

    @classmethod
    def of(cls, piece: Piece) -> Self:
        """The extent of a piece."""
        rows = piece.rows
        columns = (piece.columns.start, piece.columns.stop)
        if isinstance(rows, ListedRows):
            return cls(piece.table.name, (rows[0], rows[-1] + 1, 1), columns, len(rows))
        return cls(piece.table.name, (rows.start, rows.stop, rows.step), columns)

    @property
    def num_cells(self) -> int:
        """Rows times columns."""
        return (self.num_listed or len(range(*self.rows))) * len(range(*self.columns))


def saved_tables(tables: Sequence[Table], optimizer: Optimizers) -> dict[str, SavedTable]:
    """How tables are saved, still without parts; ``optimizer`` of all tables, or by table name."""
    state = {
        table.name: optimizers_of(tables, optimizer)[table.name].state_fields(table.dim)
        for table in tables
    }
    return {
        table.name: SavedTable(
            table.num_rows,
            table.dim,
            state[table.name],
            index=None if isinstance(table.rows, Identity) else table.rows.described(),
        )
        for table in tables
    }


def part_names(extents: Iterable[Extent], tables: Mapping[str, SavedTable]) -> dict[Extent, str]:
    """A name for each part of a checkpoint.

    The table's for the only one, such as ``C1@0-of-4`` for one of several. ``@`` stands in no
    quoted name, so that no table can take another's name.

    Args:
        extents: of all ranks' pieces to save, in rank order.
        tables: by name.
    """
    extents = list(extents)
    totals = Counter(extent.table for extent in extents)
    seen = Counter[str]()
    cells = Counter[str]()
    names = {}
    for extent in extents:
        number = seen[extent.table]
        total = totals[extent.table]
        seen[extent.table] += 1
        cells[extent.table] += extent.num_cells
        names[extent] = quote(extent.table, safe=" ") + (
            "" if total == 1 else f"@{number}-of-{total}"
        )
    for name, table in tables.items():
        assert cells[name] == table.num_rows * table.dim, (
            f"the pieces of {name!r} are not the whole table"
        )
    return names


def save_tables(
    folder: Path, views: Sequence[PieceView], names: Mapping[Extent, str]
) -> list[WrittenPart]:
    """Write this process's primary pieces into the checkpoint ``folder``, a file each.

    Args:
        folder: exists.
        views: the pieces that are here.
        names: of the parts, see :func:`part_names`.

    Raises:
        TrainingError: when a number is NaN or infinite.
        OSError: when the disk refuses.
    """
    (folder / FOLDER).mkdir(exist_ok=True)
    return [
        write_piece(folder, f"{FOLDER}/{names[Extent.of(view.piece)]}.safetensors", view)
        for view in views
        if view.piece.is_primary
    ]


def load_tables(folder: Path, saved: Mapping[str, SavedTable], views: Sequence[PieceView]) -> None:
    """Fill pieces, however they are cut, from a checkpoint whose files were verified.

    Reads weights, and what optimizer state the pieces have room for. All rows
    are marked. Memory does not grow with the tables; time grows with the bytes of the
    parts that have rows of the pieces.

    Raises:
        CheckpointError: when a tensor is missing or of another shape.
    """
    for view in views:
        table = saved[view.piece.table.name]
        for part in table.parts:
            read_part(folder, part, table.by_columns, view)
        view.mark(slice(None))


def load_averages(
    folder: Path,
    saved: Mapping[str, SavedTable],
    views: Sequence[PieceView],
    decay: float,
    step: int,
) -> None:
    """Give the pieces the moving averages of their weights as of ``step``, and no state.

    Otherwise as :func:`load_tables`. Works on so many rows at a time that memory does not grow
    with the tables.

    Args:
        folder: the checkpoint.
        saved: its tables, with averages.
        views: of whole rows.
        decay: of the averages.
        step: of the checkpoint.

    Raises:
        CheckpointError: when a tensor is missing or of another shape.
    """
    for view in views:
        table = view.piece.table
        rows = view.piece.rows
        optimizer = SGD(lr=1.0, average=decay)
        rows_at_once = max(1, AVERAGING_BYTES // (4 * optimizer.record_width(table.dim)))
        plain = replace(table, initializer=Zeros())
        for start in range(0, len(rows), rows_at_once):
            some = Piece(plain, rows[start : start + rows_at_once], range(table.dim))
            shard = MemoryShard([some], table.dim, optimizer, 0)
            load_tables(folder, saved, shard.views())
            averages = read_rows(shard, optimizer, np.arange(len(some.rows)), step)
            view.weights[start : start + rows_at_once] = averages


def mark_changes(
    folder: Path,
    saved: Mapping[str, SavedTable],
    views: Sequence[PieceView],
    name: str,
    known: Collection[str] = (),
) -> None:
    """Under a name, mark exactly the rows that a checkpoint's deltas list.

    Args:
        folder: the checkpoint.
        saved: its tables.
        views: whose rows are marked.
        name: of the marks.
        known: files of deltas that do not count.
    """
    for view in views:
        view.marks[name][:] = False
        for part in saved[view.piece.table.name].parts:
            if part.is_delta and part.file not in known:
                mark_listed(folder, part, view, name)


def check_tables_match(
    saved: Mapping[str, SavedTable], wanted: Mapping[str, SavedTable], *, same_state: bool = True
) -> None:
    """Compare the tables of a checkpoint with those of the run that wants to load it.

    Args:
        saved: by name.
        wanted: by name.
        same_state: whether all optimizer state must be the same; otherwise what is wanted must be
            there.

    Raises:
        CheckpointError: names the first table that differs, with both sizes.
    """
    do = (
        "load a checkpoint trained on this dataset, or prepare the data with the schema that it was"
        " trained on"
    )
    for name in [*wanted, *saved]:
        if name not in saved or name not in wanted:
            none = "no " if name in wanted else ""
            need = f"{wanted.get(name, 'no such table')}"
            raise CheckpointError(f"{none}table {name!r} in the checkpoint", need, do)
        have = saved[name]
        table = wanted[name]
        got = f"table {name!r} with {have} in the checkpoint"
        if (have.num_rows, have.dim, have.index) != (table.num_rows, table.dim, table.index):
            raise CheckpointError(got, f"{table}, as this run has", do)
        state = have.state.items() if same_state else have.state.items() & table.state.items()
        if set(state) != set(table.state.items()):
            raise CheckpointError(got, f"{table}", "resume with the optimizer it was saved with")
