"""The rows that changed since an export, and the dense layers: what servers go on with.

An incremental checkpoint lists the rows that were touched since its full one. Where the export was
made of that full checkpoint, all others are as they were, and nothing else is read. Otherwise all
rows are compared.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from pibroch.embedding.row_set import ListedRows
from pibroch.errors import CheckpointError, ConfigError
from pibroch.kernels.arrays import Ints, distinct
from pibroch.models.losses import logit_labels
from pibroch.overlap import refuse_overlap
from pibroch.serve.export import Advance, ExportOptions, SavedRows, check_options, write_dense
from pibroch.serve.from_delta import open_exported
from pibroch.serve.model import OpenedModel
from pibroch.serve.row_files import MappedRows
from pibroch.state.checkpoint_folder import find_checkpoint
from pibroch.state.delta_format import (
    CHANGED,
    ROW_IDS,
    ROWS,
    DeltaBase,
    DeltaManifest,
    DeltaRows,
    is_delta,
    is_exported,
    read_origin,
)
from pibroch.state.dense import AVERAGES, ROW_INDICES, WEIGHTS
from pibroch.state.event_time import write_event_time
from pibroch.state.export_files import content_version, publish
from pibroch.state.export_format import DENSE, IDS
from pibroch.state.exported_ids import write_ids
from pibroch.state.exported_rows import RowVersions, encoded
from pibroch.state.files import FileDigest, verify_file, verify_files
from pibroch.state.manifest import Manifest, read_manifest
from pibroch.state.parts import listed_ids
from pibroch.state.tensor_file import TensorFile, write_tensors
from pibroch.version import __version__

TOUCHED_BYTES = 64 << 20
"""Of weights that are read at once; each time all parts that list touched rows are read through."""
Array = NDArray[Any]


def export_delta(
    checkpoint: Path,
    since: Path,
    out: Path,
    options: ExportOptions = ExportOptions(),
    advance: Advance = lambda _: None,
) -> DeltaManifest:
    """Write what differs between a checkpoint and an export.

    Rows as the export has them, and the dense layers.

    Reads the rows that training touched where the export is of the full checkpoint that this one
    stands on, else all.

    Args:
        checkpoint: its folder, or a run directory for its best one.
        since: the export, or a delta beside what it begins at.
        out: the folder to write; servers look for what a delta begins at in the folders beside it.
        options: how; the type of rows is the export's.
        advance: told how many more rows are done.

    Raises:
        CheckpointError: for what is missing or damaged, or a checkpoint of other tables, data or
            model.
        ConfigError: for an ``out`` that is taken.
        StorageError: when the disk refuses.
        TrainingError: for weights that the type cannot hold.
    """
    check_options(out, options)
    if not is_exported(since):
        raise CheckpointError(
            f"{since} to begin at, which is no export", "a folder that `pibroch export` wrote"
        )
    folder = find_checkpoint(checkpoint)
    base = open_exported(since, verify=is_delta(since))
    based_on = [] if base.files is None else [Path(path).parent for path in base.files.paths]
    refuse_overlap(out, [folder, options.data, since, *based_on])
    manifest = read_manifest(folder)
    if options.min_count > 1:
        raise ConfigError(
            f"a delta of ids counted at least {options.min_count} times",
            "one of all ids that have rows, as rows keep their numbers",
            "export it whole, without --since",
        )
    rows = base.lookup
    assert isinstance(rows, MappedRows) and base.sha256 is not None, "an export's rows are mapped"
    if options.version == base.version:
        raise ConfigError(
            f"version {base.version!r}, which the base has",
            "another name",
            "choose another --version",
        )
    for name in (WEIGHTS, AVERAGES, ROW_INDICES):
        if name in manifest.files:
            verify_file(folder, name, manifest.files[name])
    saved = SavedRows.of(folder, manifest)
    _check_alike(saved, base, rows)
    touched = _touched_since(folder, manifest, base)

    def write(temporary: Path) -> DeltaManifest:
        if touched is None:
            versions = _compared(saved, rows, advance)
        else:
            versions = _newest(saved, rows, touched, advance)
        files: dict[str, FileDigest] = {}
        files[CHANGED], count = _write_rows(temporary / CHANGED, versions, rows)
        files[DENSE] = write_dense(temporary, folder, manifest)
        if saved.ids:
            files[IDS] = write_ids(temporary / IDS, rows.id_changes(saved.ids))
        dtype = rows.manifest.dtype
        step = manifest.progress.step
        written = DeltaManifest(
            version=options.version or content_version(step, dtype, files, str(base.sha256)),
            base=DeltaBase(version=base.version, sha256=str(base.sha256)),
            step=step,
            made_by=__version__,
            rows=(DeltaRows(file=CHANGED, num_rows=count),),
            bf16=manifest.config.train.bf16,
            files=files,
        )
        written.write(temporary)
        write_event_time(temporary, manifest.progress.event_time)
        return written

    return publish(out, write)


def _touched_since(folder: Path, manifest: Manifest, base: OpenedModel) -> dict[str, Ints] | None:
    """The rows that training touched since the base, where that is known.

    ``None`` where all are to be compared.
    """
    root = base.export
    assert root.sha256 is not None
    touched = _touched_rows(folder, manifest, read_origin(Path(root.source), root.sha256))
    if touched is None and root is base:
        open_exported(Path(root.source))  # every row of it will be compared
    return touched


def _check_alike(rows: SavedRows, base: OpenedModel, base_rows: MappedRows) -> None:
    """Raise CheckpointError unless only weights and ids differ."""
    manifest = rows.manifest
    export = base_rows.manifest
    base_tables = [
        (table.name, table.num_rows, export.dim, table.has_ids, table.has_unknown_row)
        for table in export.tables
    ]
    new_tables = [
        (name, saved.num_rows, saved.dim, name in rows.ids, name in rows.with_unknown_row)
        for name, saved in manifest.tables.items()
    ]
    differing = [
        what
        for what, differs in (
            ("data", manifest.dataset_fingerprint != base.fingerprint),
            ("tables", base_tables != new_tables),
            ("model", manifest.config.model != export.model),
            ("loss", logit_labels(manifest.config, export.schema_) != export.logit_labels),
        )
        if differs
    ]
    if differing:
        raise CheckpointError(
            f"{rows.folder}, whose {' and '.join(differing)} are not those of {base.version}",
            "a checkpoint that differs in its weights alone",
            "export it whole, without --since",
        )


def _write_rows(
    path: Path, versions: Iterator[RowVersions], rows: MappedRows
) -> tuple[FileDigest, int]:
    """The file of changed rows, whose number is known when all were seen.

    Until then they lie in unnamed files.
    """
    like = rows.stored(np.empty(0, np.int64))
    with (
        tempfile.TemporaryFile(dir=path.parent) as ids,
        tempfile.TemporaryFile(dir=path.parent) as records,
    ):
        count = 0
        for row_ids, changed in versions:
            ids.write(np.ascontiguousarray(row_ids, np.int64).data)
            records.write(np.ascontiguousarray(changed).data)
            count += len(row_ids)
        arrays = {
            ROW_IDS: _mapped(ids, np.dtype(np.int64), (count,)),
            ROWS: _mapped(records, like.dtype, (count, *like.shape[1:])),
        }
        return write_tensors(path, arrays), count


def _mapped(file: IO[bytes], dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """What was written to a file; nothing cannot be mapped."""
    file.flush()
    return np.memmap(file, dtype, "r", shape=shape) if shape[0] else np.empty(shape, dtype)


def _compared(saved: SavedRows, base: MappedRows, advance: Advance) -> Iterator[RowVersions]:
    """Rows that differ from those of a base, rising, a few at a time; every row is read."""
    verify_files(saved.folder, saved.manifest.files)
    for table in base.manifest.tables:
        first = table.first_row
        for weights in saved.chunks(table.name, range(table.num_rows), advance):
            row_ids = np.arange(first, first + len(weights))
            first += len(weights)
            rows = encoded(weights, base.manifest.dtype)
            differs = (_bytes_of(rows) != _bytes_of(base.stored(row_ids))).any(1)
            yield RowVersions(row_ids[differs], rows[differs])


def _newest(
    saved: SavedRows, base: MappedRows, touched: Mapping[str, Ints], advance: Advance
) -> Iterator[RowVersions]:
    """Rows that training touched, and those that a base has newer than its export; likewise.

    Unless touched, the latter are as in the export again.
    """
    deltas = {
        name: replace(table, parts=tuple(part for part in table.parts if part.is_delta))
        for name, table in saved.manifest.tables.items()
    }
    only_deltas = replace(saved, manifest=saved.manifest.model_copy(update={"tables": deltas}))
    step = max(1, TOUCHED_BYTES // (4 * base.manifest.dim))
    for table in base.manifest.tables:
        name = table.name
        newer = base.changed_rows - table.first_row
        newer = newer[(newer >= 0) & (newer < table.num_rows)]
        rows = distinct(np.concatenate([touched[name], newer]))
        for start in range(0, len(rows), step):
            some = rows[start : start + step]
            is_touched = np.isin(some, touched[name], assume_unique=True)
            versions = base.exported(some + table.first_row)
            if is_touched.any():
                weights = only_deltas.weights(name, ListedRows.of(some[is_touched]))
                versions[is_touched] = encoded(weights, base.manifest.dtype)
            yield RowVersions(some + table.first_row, versions)
        advance(table.num_rows)


def _bytes_of(rows: Array) -> NDArray[np.uint8]:
    return np.ascontiguousarray(rows).view(np.uint8)


def _touched_rows(
    folder: Path, manifest: Manifest, origin: dict[str, str]
) -> dict[str, Ints] | None:
    """By table the rows that training touched since the checkpoint that an export was made of.

    ``None`` where that is not known: where the tables' files of the export have other checksums
    than ``origin``, or some columns alone were touched.
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
        each = [distinct(np.concatenate(ids)) for ids in by_columns.values()]
        rows = distinct(np.concatenate([np.empty(0, np.int64), *each]))
        width = sum(after - first for first, after in by_columns)
        if len(rows) and (width != table.dim or any(len(own) < len(rows) for own in each)):
            return None  # some columns of a row are in the full checkpoint alone
        touched[name] = rows
    return touched
