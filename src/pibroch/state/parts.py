"""Parts of tables on disk: some rows times some columns, in a safetensors file of their own.

A reader takes from every part the rows and columns that it wants, so what was cut in one way loads
into pieces cut in another.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pibroch.embedding.piece import Piece, PieceView, RowArray
from pibroch.embedding.row_set import (
    ListedRows,
    RowSet,
    as_slice,
    common,
    ids_of,
    places,
    places_of,
)
from pibroch.kernels.arrays import Array, Ints
from pibroch.state.files import FileDigest
from pibroch.state.tensor_file import Stream, TensorFile, rows_that_fit, write_tensors

ROW_IDS = "row_ids"
WEIGHT = "weight"

Rows = slice | NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SavedPart:
    """Where a part of a table lies, and which one it is.

    Attributes:
        file: path inside the checkpoint, holding ``weight`` and the fields of optimizer state.
        columns: first and last + 1 of the weights' columns.
        rows: start, stop and step of the rows' ids; ``None`` when the file lists them, rising, as
            ``row_ids``.
        is_delta: whether these are rows that changed since the parts before were written.
    """

    file: str
    columns: tuple[int, int]
    rows: tuple[int, int, int] | None
    is_delta: bool


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """A part that is on the disk now."""

    table: str
    part: SavedPart
    digest: FileDigest


def write_piece(folder: Path, file: str, view: PieceView) -> WrittenPart:
    """Write all rows of a piece.

    Raises:
        TrainingError: when a number is NaN or infinite.
        OSError: when the disk refuses.
    """
    piece = view.piece
    tensors = {WEIGHT: view.weights, **view.state}
    rows = None
    if isinstance(piece.rows, ListedRows):
        streams: dict[str, RowArray | Stream] = {ROW_IDS: Stream.of(piece.rows.ids), **tensors}
    else:
        streams = dict(tensors)
        rows = (piece.rows.start, piece.rows.stop, piece.rows.step)
    part = SavedPart(file, (piece.columns.start, piece.columns.stop), rows, is_delta=False)
    return WrittenPart(piece.table.name, part, write_tensors(folder / file, streams))


def read_part(folder: Path, part: SavedPart, by_columns: Collection[str], view: PieceView) -> None:
    """Fill what a piece and a part have in common.

    These are weights, and each field of optimizer state that the piece has room for.

    Args:
        folder: the checkpoint.
        part: what to read.
        by_columns: tensors with a float for each column; of any other a part has the whole row.
        view: is written to.

    Raises:
        CheckpointError: when a tensor is missing or of another shape.
    """
    piece = view.piece
    columns = common(range(*part.columns), piece.columns)
    if not columns or (part.rows is not None and not _may_meet(range(*part.rows), piece.rows)):
        return
    with TensorFile(folder, part.file) as file:
        for name, target in {WEIGHT: view.weights, **view.state}.items():
            source_columns = target_columns = slice(None)
            if name in by_columns:
                source_columns = slice(
                    columns.start - part.columns[0], columns.stop - part.columns[0]
                )
                target_columns = slice(
                    columns.start - piece.columns.start, columns.stop - piece.columns.start
                )
            width = part.columns[1] - part.columns[0] if name in by_columns else target.shape[1]
            _check_tensor(file, name, part, width)
            for rows, chunk in _wanted_rows(file, name, part, piece):
                target[rows, target_columns] = chunk[:, source_columns]


def mark_listed(folder: Path, part: SavedPart, view: PieceView, name: str) -> None:
    """Mark the rows of a piece that a delta lists, under a name."""
    if common(range(*part.columns), view.piece.columns):
        with TensorFile(folder, part.file) as file:
            for rows, _ in _wanted_rows(file, ROW_IDS, part, view.piece):
                view.marks[name][rows] = True


def _may_meet(part: range, wanted: RowSet) -> bool:
    if isinstance(wanted, range):
        return len(common(part, wanted)) > 0
    return len(wanted) > 0 and part.start <= wanted[-1] and part.stop > wanted[0]


def _wanted_rows(
    file: TensorFile, name: str, part: SavedPart, piece: Piece
) -> Iterator[tuple[Rows, Array]]:
    """The rows of a tensor that lie in a piece, some at a time, each with its places there."""
    wanted = piece.rows
    if part.rows is None:
        yield from _listed_rows(file, name, wanted, piece.table.num_rows)
    elif isinstance(wanted, range):
        yield from _spaced_rows(file, name, range(*part.rows), wanted)
    else:
        here = range(*part.rows)
        for first, chunk in file.chunks(name, range(len(here))):
            yield _chosen(here[first : first + len(chunk)], wanted, chunk)


def _spaced_rows(
    file: TensorFile, name: str, here: range, wanted: range
) -> Iterator[tuple[Rows, Array]]:
    both = common(here, wanted)
    stored = places(both, here)
    held = places(both, wanted)
    for first, chunk in file.chunks(name, range(stored[0], stored[-1] + 1)):
        begin, end = (
            -(-(bound - stored.start) // stored.step) for bound in (first, first + len(chunk))
        )
        if begin < end:
            inside = stored[begin:end]
            yield (
                as_slice(held[begin:end]),
                chunk[inside[0] - first : inside[-1] - first + 1 : inside.step],
            )


def _listed_rows(
    file: TensorFile, name: str, wanted: RowSet, num_rows: int
) -> Iterator[tuple[Rows, Array]]:
    shape = file.shape(name)
    rows_per_chunk = rows_that_fit(8 * math.prod(shape[1:]))
    chunks = file.chunks(name, range(shape[0]), rows_per_chunk)
    for ids, (_, chunk) in zip(listed_ids(file, num_rows, rows_per_chunk), chunks, strict=True):
        yield _chosen(ListedRows.of(ids), wanted, chunk)


def listed_ids(
    file: TensorFile, num_rows: int = sys.maxsize, rows_per_chunk: int | None = None
) -> Iterator[Ints]:
    """The ids of the rows in a file that lists them, some at a time, each valid until the next.

    Raises:
        CheckpointError: unless they are rising rows of a table of ``num_rows``.
    """
    shape = file.shape(ROW_IDS)
    last = -1
    need = f"rising int64 row ids from 0 to {num_rows - 1}"
    if len(shape) != 1 or file.dtype(ROW_IDS) != np.int64:
        raise file.refusal(f"{ROW_IDS!r} {list(shape)} in {file.path}", need)
    for first, ids in file.chunks(ROW_IDS, range(shape[0]), rows_per_chunk):
        if ids[0] <= last or ids[-1] >= num_rows or (np.diff(ids) <= 0).any():
            raise file.refusal(f"{ROW_IDS!r} of other rows from {first} on in {file.path}", need)
        last = int(ids[-1])
        yield ids


def _chosen(here: RowSet, wanted: RowSet, numbers: Array) -> tuple[Rows, Array]:
    """Those of some rows' numbers that are wanted, with their places there."""
    held = places_of(wanted, ids_of(here))
    mask = held >= 0
    return held[mask], numbers[mask]


def _check_tensor(file: TensorFile, name: str, part: SavedPart, width: int) -> None:
    rows = file.shape(ROW_IDS)[:1] if part.rows is None else (len(range(*part.rows)),)
    if file.shape(name) != (*rows, width) or file.dtype(name).kind not in "fiu":
        raise file.refusal(
            f"{name!r} {file.dtype(name)} {list(file.shape(name))} in {file.path}",
            f"{width} floats in each of {rows[0] if rows else 0} rows",
        )
