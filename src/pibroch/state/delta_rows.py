"""A delta's rows in files: those that changed, and the ids of those that are no more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pibroch.embedding import RowArray
from pibroch.kernels.arrays import Ints, Records
from pibroch.state.delta_format import DELETED, ROW_IDS, ROWS, DeltaRows
from pibroch.state.export_format import EXPORT, ExportDtype
from pibroch.state.exported_rows import (
    RowVersions,
    check_finite,
    check_written,
    row_stream,
    written_as,
)
from pibroch.state.files import FileDigest
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
    if len(versions) > 1 and len(np.unique(ids)) < len(ids):
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
