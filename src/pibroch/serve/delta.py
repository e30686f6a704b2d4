"""The rows that changed since an export, and the dense layers.

What a server needs to go on to a newer version.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from pibroch.errors import CheckpointError, ConfigError
from pibroch.kernels.arrays import Ints
from pibroch.overlap import refuse_overlap
from pibroch.serve.changed_rows import Advance, compared_rows, find_touched, touched_rows
from pibroch.serve.export import ExportOptions, check_options, must_be_exportable, write_dense
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
    read_origin,
)
from pibroch.state.dense import AVERAGES, WEIGHTS
from pibroch.state.export_files import content_version, publish
from pibroch.state.export_format import DENSE, is_export
from pibroch.state.exported_rows import RowVersions
from pibroch.state.files import FileDigest, verify_file
from pibroch.state.manifest import Manifest, read_manifest
from pibroch.state.tensor_file import BUFFER_BYTES, Stream, write_tensors
from pibroch.version import __version__


def export_delta(
    checkpoint: Path,
    since: Path,
    out: Path,
    options: ExportOptions | None = None,
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
    options = options or ExportOptions()
    check_options(out, options)
    if not is_export(since) and not is_delta(since):
        raise CheckpointError(
            f"{since} to begin at, which is no export", "a folder that `pibroch export` wrote"
        )
    folder = find_checkpoint(checkpoint)
    base = open_exported(since, verify=is_delta(since))
    based_on = [] if base.files is None else [Path(path).parent for path in base.files.paths]
    refuse_overlap(out, [folder, options.data, since, *based_on])
    manifest = read_manifest(folder)
    must_be_exportable(manifest)
    rows = base.lookup
    assert isinstance(rows, MappedRows) and base.sha256 is not None, "an export's rows are mapped"
    if options.version == base.version:
        raise ConfigError(
            f"version {base.version!r}, which the base has",
            "another name",
            "choose another --version",
        )
    _check_alike(folder, manifest, base, rows)
    for name in (WEIGHTS, AVERAGES):
        if name in manifest.files:
            verify_file(folder, name, manifest.files[name])
    touched = _touched_since(folder, manifest, base)

    def write(temporary: Path) -> DeltaManifest:
        if touched is None:
            versions = compared_rows(folder, manifest, rows, advance)
        else:
            versions = touched_rows(folder, manifest, rows, touched, advance)
        files: dict[str, FileDigest] = {}
        files[CHANGED], count = _write_rows(temporary / CHANGED, versions, rows)
        files[DENSE] = write_dense(temporary, folder, manifest)
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
        return written

    return publish(out, write)


def _touched_since(folder: Path, manifest: Manifest, base: OpenedModel) -> dict[str, Ints] | None:
    """The rows that training touched since the base, where that is known.

    ``None`` where all are to be compared.
    """
    root = base.root or base
    assert root.sha256 is not None
    touched = find_touched(folder, manifest, read_origin(Path(root.source), root.sha256))
    if touched is None and root is base:
        open_exported(Path(root.source))  # every row of it will be compared
    return touched


def _check_alike(folder: Path, manifest: Manifest, base: OpenedModel, rows: MappedRows) -> None:
    """Raise CheckpointError unless only weights differ."""
    export = rows.manifest
    base_tables = [(table.name, table.num_rows, export.dim) for table in export.tables]
    new_tables = [(name, saved.num_rows, saved.dim) for name, saved in manifest.tables.items()]
    differing = [
        what
        for what, differs in (
            ("data", manifest.dataset_fingerprint != base.fingerprint),
            ("tables", base_tables != new_tables),
            ("model", manifest.config.model != export.model),
        )
        if differs
    ]
    if differing:
        raise CheckpointError(
            f"{folder}, whose {' and '.join(differing)} are not those of {base.version}",
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
        streams = {
            ROW_IDS: Stream(np.dtype(np.int64), (count,), _spooled(ids, np.dtype(np.int64), ())),
            ROWS: Stream(
                like.dtype, (count, *like.shape[1:]), _spooled(records, like.dtype, like.shape[1:])
            ),
        }
        return write_tensors(path, streams), count


def _spooled(
    file: IO[bytes], dtype: np.dtype[Any], shape: tuple[int, ...]
) -> Iterator[NDArray[Any]]:
    file.seek(0)
    row_bytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    while chunk := file.read(max(1, BUFFER_BYTES // row_bytes) * row_bytes):
        yield np.frombuffer(chunk, dtype).reshape(-1, *shape)
