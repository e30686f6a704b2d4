"""A model from an export: tables and dictionaries mapped, the dense layers in memory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pibroch.data.encode import index_problem
from pibroch.data.mapped import FileWatch
from pibroch.data.transform import FIRST_ROW
from pibroch.data.vocabularies import Vocabularies
from pibroch.errors import DamagedCheckpointError
from pibroch.serve.model import OpenedModel, dense_layers
from pibroch.serve.row_files import MappedRows
from pibroch.serve.split_rows import RowSplit, SplitRows
from pibroch.state.event_time import event_time_of
from pibroch.state.export_format import (
    DENSE,
    EXPORT,
    FORMAT,
    MANIFEST,
    VOCABULARIES,
    ExportManifest,
    read_checked,
)
from pibroch.state.exported_rows import check_finite
from pibroch.state.files import check_sizes, verify_file
from pibroch.state.tensor_file import TensorFile, load_tensors
from pibroch.untrusted import open_file


def open_export(folder: Path, verify: bool = True, split: RowSplit = RowSplit()) -> OpenedModel:
    """Map an export.

    Args:
        folder: of it.
        verify: read every byte once and compare; not needed when another process has just done so.
        split: where the rows are; files of rows that are elsewhere are not looked at.

    Raises:
        CheckpointError: when it is missing, damaged, or of another layout.
    """
    manifest, sha256 = read_checked(folder, MANIFEST, FORMAT, ExportManifest)
    held = split.held(sum(table.num_rows for table in manifest.tables))
    elsewhere = {shard.file for shard in manifest.shards if not shard.meets(held)}
    files = {name: digest for name, digest in manifest.files.items() if name not in elsewhere}
    watch = watched(folder, files)
    check_sizes(folder, files, EXPORT)
    has_rows = {shard.file for shard in manifest.shards}
    for name, digest in files.items() if verify else ():
        verify_file(folder, name, digest, EXPORT)
        if name in has_rows:
            check_finite(folder, name)
    if split.is_whole:
        rows = MappedRows(folder, manifest, held)
    else:
        rows = SplitRows(folder, manifest, held, sha256, split)
    state = load_tensors(folder, DENSE, EXPORT)
    vocabularies = exported_vocabularies(folder, manifest, verify)
    watch.check_names()
    return OpenedModel(
        source=str(folder),
        version=manifest.version,
        step=manifest.step,
        schema=manifest.schema_,
        fingerprint=manifest.fingerprint,
        features=rows.features,
        dim=manifest.dim,
        lookup=rows,
        dense=dense_layers(manifest.model, manifest.schema_, rows.features, state, str(folder)),
        bf16=manifest.bf16,
        vocabularies=vocabularies,
        logit_labels=manifest.logit_labels,
        sha256=sha256,
        files=watch,
        event_time=event_time_of(folder),
    )


def watched(folder: Path, names: Iterable[str]) -> FileWatch:
    """Notices when files of an export or a delta change while they are served.

    Raises:
        DamagedCheckpointError: when one is missing.
    """
    watch = FileWatch(_changed)
    for name in names:
        watch.add_open(str(folder / name), open_file(folder, name, EXPORT))
    return watch


def _changed(path: str, how: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"{path}, which was {how} since it was opened",
        "an export that stays as it is while it is served",
        "write the next one into a folder of its own, or by `pibroch export --overwrite`",
    )


def exported_vocabularies(
    folder: Path, manifest: ExportManifest, verify: bool = True
) -> Vocabularies | None:
    """The dictionaries of an export, mapped; ``None`` for one that was written without.

    Raises:
        CheckpointError: when the file does not fit the manifest.
    """
    schema = manifest.schema_
    needed = [feature.name for feature in schema.owners if feature.has_vocabulary]
    if not needed:
        return Vocabularies(schema, manifest.fingerprint, {})
    if VOCABULARIES not in manifest.files:
        return None
    with TensorFile(folder, VOCABULARIES, EXPORT) as file:
        codes = {name: file.mapped(f"{name}.codes") for name in needed}
        slots = {name: file.mapped(f"{name}.slots") for name in needed}
    num_rows = {table.name: table.num_rows for table in manifest.tables if not table.has_ids}
    for name in needed if verify else ():
        problem = index_problem(codes[name], slots[name])
        count = num_rows.get(name)
        if not problem and count not in (None, len(codes[name]) + FIRST_ROW):
            problem = f"{len(codes[name]):,} codes for {count:,} rows"
        if problem:
            got = f"the dictionary of {name!r} in {folder / VOCABULARIES} with {problem}"
            raise EXPORT(got, "a code for each row, all of which their slots find")
    return Vocabularies(schema, manifest.fingerprint, codes, slots)
