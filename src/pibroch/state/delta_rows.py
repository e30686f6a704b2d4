"""A delta's rows in files: those that changed, and the ids of those that are no more.

Each rank gives the rows that it holds. Those of tables that a plan cuts by columns lie in parts on
several ranks: they are brought together, each rank taking an even part of such a table's rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from pibroch.collectives import Channel
from pibroch.embedding import PieceView, RowArray
from pibroch.embedding.row_set import ids_of
from pibroch.kernels.arrays import Ints, Records, distinct
from pibroch.state.delta_format import DELETED, ROW_IDS, ROWS, DeltaRows
from pibroch.state.export_format import EXPORT, ExportDtype, ExportedTable
from pibroch.state.exported_rows import (
    RowVersions,
    check_finite,
    check_written,
    row_stream,
    written_as,
)
from pibroch.state.files import FileDigest
from pibroch.state.row_blocks import sent_to_ranks
from pibroch.state.tensor_file import Stream, TensorFile, rows_that_fit, write_tensors


@dataclass(frozen=True, slots=True)
class RowsToWrite:
    """Rows with their weights.

    Attributes:
        row_ids: int64 ``[r]``, rising, among the rows of all tables.
        weights: float32 ``[r, D]``; may lie elsewhere, and are read some at a time.
    """

    row_ids: Ints
    weights: RowArray


def write_rows(
    path: Path, parts: Sequence[RowsToWrite], dim: int, dtype: ExportDtype, deleted: Ints
) -> FileDigest:
    """Write a file of a delta's rows.

    Args:
        path: of the file.
        parts: with rising rows, each behind the one before.
        dim: weights in a row.
        dtype: of the rows as they are written.
        deleted: int64, rising: rows that are no more.

    Raises:
        TrainingError: for weights that the type cannot hold.
        OSError: when the disk refuses.
    """
    row_ids = np.concatenate([np.empty(0, np.int64), *(part.row_ids for part in parts)])
    streams = {ROW_IDS: Stream.of(row_ids), DELETED: Stream.of(deleted)}
    return write_tensors(
        path, {**streams, ROWS: row_stream(dim, dtype, len(row_ids), _chunks(parts, dim))}
    )


def _chunks(parts: Sequence[RowsToWrite], dim: int) -> Iterator[Records]:
    step = rows_that_fit(4 * dim)
    for part in parts:
        for start in range(0, len(part.row_ids), step):
            yield np.ascontiguousarray(part.weights[start : start + step], np.float32)


def opened_rows(
    folder: Path, files: Sequence[DeltaRows], num_rows: int, dim: int, dtype: ExportDtype
) -> list[RowVersions]:
    """A delta's rows, mapped from files that were verified; those that are no more are zeros.

    Args:
        folder: of the delta.
        files: of its rows.
        num_rows: of the export that it stands on.
        dim: weights in a row.
        dtype: of the rows.

    Raises:
        DamagedCheckpointError: for files other than these, or have a row twice.
    """
    versions: list[RowVersions] = []
    for each in files:
        path = folder / each.file
        with TensorFile(folder, each.file, EXPORT) as file:
            row_ids = file.mapped(ROW_IDS)
            rows = file.mapped(ROWS)
            deleted = file.mapped(DELETED) if each.num_deleted else np.empty(0, np.int64)
        check_written(path, rows, each.num_rows, dim, dtype)
        check_finite(folder, each.file)
        _check_ids(path, row_ids, each.num_rows, num_rows)
        _check_ids(path, deleted, each.num_deleted, num_rows)
        kind, width = written_as(dim, dtype)
        zeros = np.zeros((len(deleted), width), kind)
        versions += [RowVersions(row_ids, rows), RowVersions(deleted, zeros)]
    versions = [each for each in versions if len(each.row_ids)]
    ids = np.concatenate([np.empty(0, np.int64), *(each.row_ids for each in versions)])
    if len(versions) > 1 and len(distinct(ids)) < len(ids):
        raise EXPORT(f"{folder} with a row in two places", "each row once")
    return versions


def _check_ids(path: Path, row_ids: Ints, count: int, num_rows: int) -> None:
    is_rising = (
        row_ids.dtype == np.int64
        and row_ids.shape == (count,)
        and bool((np.diff(row_ids) > 0).all())
    )
    if not is_rising or (count and not 0 <= row_ids[0] <= row_ids[-1] < num_rows):
        raise EXPORT(f"{path} with other row ids", f"rising ones below {num_rows}")


def files_of_rank(
    views: Sequence[PieceView], tables: Mapping[str, ExportedTable], channel: Channel
) -> list[list[RowsToWrite]]:
    """The rows of this rank's pieces by file, whose parts rise; every rank calls it."""
    held = [view for view in views if view.piece.is_primary]
    own = {view.piece.table.name for view in held if len(view.piece.columns) < view.piece.table.dim}
    cut = sorted({name for names in channel.gather(sorted(own)) for name in names})
    parts = [
        RowsToWrite(tables[view.piece.table.name].first_row + ids_of(view.piece.rows), view.weights)
        for view in held
        if view.piece.table.name not in cut and len(view.piece.rows)
    ]
    for name in cut:
        pieces = [view for view in held if view.piece.table.name == name]
        together = _brought_together(pieces, tables[name], channel)
        parts += [together] if len(together.row_ids) else []
    files: list[list[RowsToWrite]] = []
    for part in sorted(parts, key=lambda part: int(part.row_ids[0])):
        for file in files:
            if file[-1].row_ids[-1] < part.row_ids[0]:
                file.append(part)
                break
        else:
            files.append([part])
    return files


def _brought_together(
    pieces: Sequence[PieceView], table: ExportedTable, channel: Channel
) -> RowsToWrite:
    """Rows of a table whose columns lie on several ranks, as far as this rank takes them."""
    size = channel.ranks.world_size
    going_ids: list[list[Ints]] = [[] for _ in range(size)]
    going: list[list[Records]] = [[] for _ in range(size)]
    headers: list[list[tuple[int, int, int]]] = [[] for _ in range(size)]
    for view in pieces:
        ids = ids_of(view.piece.rows)
        bounds = np.searchsorted(ids, [rank * table.num_rows // size for rank in range(size + 1)])
        for rank, (begin, end) in enumerate(pairwise(bounds)):
            columns = view.piece.columns
            headers[rank].append((int(end - begin), columns.start, columns.stop))
            going_ids[rank].append(ids[begin:end])
            going[rank].append(np.ascontiguousarray(view.weights[begin:end], np.float32).ravel())
    coming = [each[channel.ranks.rank] for each in channel.gather(headers)]
    counts = [sum(n for n, *_ in each) for each in coming]
    num_floats = [sum(n * (b - a) for n, a, b in each) for each in coming]
    ids_in = sent_to_ranks(channel, going_ids, counts, np.int64)
    numbers = sent_to_ranks(channel, going, num_floats, np.float32)
    rows, places = np.unique(np.concatenate([each.numbers for each in ids_in]), return_inverse=True)
    dim = max((stop for each in coming for *_, stop in each), default=0)
    weights = np.empty((len(rows), dim), np.float32)
    num_columns = np.zeros(len(rows), np.int64)
    for header, received in zip(coming, numbers, strict=True):
        for count, start, stop in header:
            here = places[:count]
            places = places[count:]
            weights[here, start:stop] = received.take(count, stop - start)
            num_columns[here] += stop - start
    assert (num_columns == dim).all(), "all columns of a row are updated together"
    return RowsToWrite(table.first_row + rows, weights)
