"""A model from an export: tables and dictionaries mapped, the dense layers in memory."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from pibroch.data.vocabularies import Vocabularies
from pibroch.embedding.storage import verify_file
from pibroch.embedding.tensor_file import TensorFile
from pibroch.errors import DamagedCheckpointError, PibrochError
from pibroch.serve.delta_format import read_export_with_checksum
from pibroch.serve.export_format import DENSE, VOCABULARIES, ExportManifest
from pibroch.serve.model import OpenedModel, dense_layers
from pibroch.serve.row_files import MappedRows
from pibroch.serve.split_rows import RowSplit, SplitRows


def open_export(folder: Path, verify: bool = True, split: RowSplit = RowSplit()) -> OpenedModel:
    """Map an export.

    Args:
        folder: of it.
        verify: read every byte once and compare; not needed when another process has just done so.
        split: where the rows are; files of rows that are elsewhere are not looked at.

    Raises:
        CheckpointError: when it is missing, damaged, or of another layout.
    """
    manifest, sha256 = read_export_with_checksum(folder)
    total = sum(table.num_rows for table in manifest.tables)
    elsewhere = {
        shard.file for shard in manifest.shards if not (split.is_whole or split.needs(shard, total))
    }
    for name, digest in manifest.files.items() if verify else ():
        if name not in elsewhere:
            verify_file(folder / name, digest)
    try:
        rows = (
            MappedRows(folder, manifest)
            if split.is_whole
            else SplitRows(folder, manifest, sha256, split)
        )
        state = load_file(folder / DENSE)
        vocabularies = exported_vocabularies(folder, manifest)
    except PibrochError:
        raise
    except Exception as error:  # of whatever a file that was not verified holds
        raise DamagedCheckpointError(
            f"{folder}, which is damaged: {error}", "a whole export", "export again"
        ) from error
    num_dense, features = len(manifest.schema_.dense), [table.name for table in manifest.tables]
    return OpenedModel(
        source=str(folder),
        version=manifest.version,
        step=manifest.step,
        schema=manifest.schema_,
        fingerprint=manifest.fingerprint,
        features=rows.features,
        num_rows={table.name: table.num_rows for table in manifest.tables},
        dim=manifest.dim,
        lookup=rows,
        dense=dense_layers(manifest.model, num_dense, features, state, str(folder)),
        bf16=manifest.bf16,
        vocabularies=vocabularies,
        sha256=sha256,
        is_remote=split.is_remote,
    )


def exported_vocabularies(folder: Path, manifest: ExportManifest) -> Vocabularies | None:
    """The dictionaries of an export, mapped; ``None`` for one that was written without.

    Raises:
        CheckpointError: when the file does not fit the manifest.
    """
    schema = manifest.schema_
    needed = [feature.name for feature in schema.categorical if feature.fixed_num_rows is None]
    if not needed:
        return Vocabularies(schema, manifest.fingerprint, {})
    if VOCABULARIES not in manifest.files:
        return None
    with TensorFile(folder / VOCABULARIES) as file:
        codes = {name: file.mapped(f"{name}.codes") for name in needed}
        slots = {name: file.mapped(f"{name}.slots") for name in needed}
    return Vocabularies(schema, manifest.fingerprint, codes, slots)
