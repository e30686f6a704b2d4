"""Which rows of a checkpoint differ from those of an export, and how they are written.

An incremental checkpoint lists the rows that were touched since its full one. Where the export was
made of that full checkpoint, all others are as they were, and nothing else is read. Otherwise all
rows are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pibroch.embedding.row_set import ListedRows
from pibroch.kernels.arrays import Ints
from pibroch.serve.export import weights_of
from pibroch.serve.row_files import MappedRows
from pibroch.state.export_format import ExportedTable
from pibroch.state.exported_rows import RowVersions, encoded
from pibroch.state.files import verify_file, verify_files
from pibroch.state.manifest import Manifest
from pibroch.state.parts import listed_ids
from pibroch.state.tensor_file import TensorFile, rows_that_fit

TOUCHED_BYTES = 64 << 20
"""Of weights that are read at once; each time all parts that list touched rows are read through."""

Advance = Callable[[int], None]
Array = NDArray[Any]


def compared_rows(
    folder: Path, manifest: Manifest, base: MappedRows, advance: Advance
) -> Iterator[RowVersions]:
    """Rows that differ from the base's, of all, rising, a few at a time.

    Args:
        folder: of the checkpoint.
        manifest: of it.
        base: what they are compared with, verified.
        advance: told how many more rows are done.

    Raises:
        DamagedCheckpointError: for a file that is missing or damaged.
        TrainingError: for weights that the type cannot hold.
    """
    verify_files(folder, manifest.files)
    for table in base.manifest.tables:
        for current in _all_rows(folder, manifest, base, table):
            before = base.stored(current.row_ids)
            differs = (_bytes_of(current.rows) != _bytes_of(before)).any(1)
            yield RowVersions(current.row_ids[differs], current.rows[differs])
            advance(len(current.row_ids))


def touched_rows(
    folder: Path,
    manifest: Manifest,
    base: MappedRows,
    touched: Mapping[str, Ints],
    advance: Advance,
) -> Iterator[RowVersions]:
    """As :func:`compared_rows`, for rows that training touched.

    And for those that are newer in the base than in its export.

    Args:
        folder: of the checkpoint.
        manifest: of it.
        base: of which only rows newer than its export's are read.
        touched: rows by table, see :func:`find_touched`.
        advance: told how many more rows are done.
    """
    for table in base.manifest.tables:
        yield from _versions(folder, manifest, base, table, touched[table.name])
        advance(table.num_rows)


def _bytes_of(rows: Array) -> NDArray[np.uint8]:
    return np.ascontiguousarray(rows).view(np.uint8)


def find_touched(
    folder: Path, manifest: Manifest, origin: dict[str, str]
) -> dict[str, Ints] | None:
    """By table the rows that training touched since the checkpoint that an export was made of.

    ``None`` if not known.

    Args:
        folder: of the checkpoint.
        manifest: of it.
        origin: checksums of the tables' files that the export was made of, none where that is not
            known.

    Raises:
        DamagedCheckpointError: for a list of rows that is missing or damaged.
    """
    parts = [part for table in manifest.tables.values() for part in table.parts]
    full = {part.file: manifest.files[part.file].sha256 for part in parts if not part.is_delta}
    # averages move while their rows rest
    if full != origin or manifest.config.train.average is not None:
        return None
    touched = {}
    for name, table in manifest.tables.items():
        by_columns: dict[tuple[int, int], list[Ints]] = {}
        for part in table.parts:
            if part.is_delta:
                verify_file(folder, part.file, manifest.files[part.file])
                with TensorFile(folder, part.file) as file:
                    ids = [chunk.copy() for chunk in listed_ids(file, table.num_rows)]
                by_columns.setdefault(part.columns, []).extend(ids)
        if any(left[1] > right[0] for left, right in pairwise(sorted(by_columns))):
            return None
        each = {columns: np.unique(np.concatenate(ids)) for columns, ids in by_columns.items()}
        rows = np.unique(np.concatenate([np.empty(0, np.int64), *each.values()]))
        columns_of_row = np.zeros(len(rows), np.int64)
        for (first, after), own in each.items():
            columns_of_row[np.searchsorted(rows, own)] += after - first
        if (columns_of_row != table.dim).any():
            return None  # some columns of a row are in the full checkpoint alone
        touched[name] = rows
    return touched


def _all_rows(
    folder: Path, manifest: Manifest, base: MappedRows, table: ExportedTable
) -> Iterator[RowVersions]:
    step = rows_that_fit(4 * base.manifest.dim)
    for start in range(0, table.num_rows, step):
        some = range(start, min(start + step, table.num_rows))
        weights = weights_of(folder, manifest, table.name, some)
        row_ids = np.arange(table.first_row + some.start, table.first_row + some.stop)
        yield RowVersions(row_ids, encoded(weights, base.manifest.dtype))


def _versions(
    folder: Path, manifest: Manifest, base: MappedRows, table: ExportedTable, touched: Ints
) -> Iterator[RowVersions]:
    """Rows touched, and those that the base has newer than its export.

    Unless touched, they are as in the export again.
    """
    saved = manifest.tables[table.name]
    deltas = replace(saved, parts=tuple(part for part in saved.parts if part.is_delta))
    only_deltas = manifest.model_copy(update={"tables": {**manifest.tables, table.name: deltas}})
    newer = base.changed_rows - table.first_row
    newer = newer[(newer >= 0) & (newer < table.num_rows)]
    rows = np.union1d(touched, newer)
    step = max(1, TOUCHED_BYTES // (4 * base.manifest.dim))
    for start in range(0, len(rows), step):
        some = rows[start : start + step]
        is_touched = np.isin(some, touched, assume_unique=True)
        versions = base.exported(some + table.first_row)
        if is_touched.any():
            weights = weights_of(folder, only_deltas, table.name, ListedRows.of(some[is_touched]))
            versions[is_touched] = encoded(weights, base.manifest.dtype)
        yield RowVersions(some + table.first_row, versions)
