"""A model from an export and the deltas that stand on it.

What did not change is shared with what they begin at.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import nn

from pibroch.serve.from_export import open_export, watched
from pibroch.serve.model import OpenedModel, dense_layers
from pibroch.serve.row_files import MappedRows
from pibroch.serve.split_rows import RowSplit
from pibroch.state.delta_format import DeltaManifest, is_delta, read_delta
from pibroch.state.delta_rows import opened_rows
from pibroch.state.event_time import event_time_of
from pibroch.state.export_format import DENSE, EXPORT
from pibroch.state.exported_ids import read_ids
from pibroch.state.files import verify_file
from pibroch.state.tensor_file import load_tensors
from pibroch.state.versions import base_of, must_be_short


def open_exported(
    folder: Path,
    opened: OpenedModel | None = None,
    verify: bool = True,
    split: RowSplit = RowSplit(),
) -> OpenedModel:
    """Map an export, or a delta and what it begins at; bytes not yet verified are verified.

    Args:
        folder: of it. What a delta begins at is looked for in the folders beside it.
        opened: a model that is open, which is shared where the delta begins at it, or at the export
            that it stands on.
        verify: read every byte of an export once and compare; those of a delta always are.
        split: where an export's rows are, the same of ``opened``; a delta's are all here.

    Raises:
        CheckpointError: when something is missing, damaged, or of another layout.
    """
    links: list[tuple[Path, DeltaManifest, str]] = []
    model: OpenedModel | None = None
    while is_delta(folder) and model is None:
        manifest, sha256 = read_delta(folder)
        links.append((folder, manifest, sha256))
        must_be_short(len(links))
        model = None if opened is None else opened.known(manifest.base.sha256)
        if model is None:
            folder = base_of(folder, manifest)
    model = open_export(folder, verify, split) if model is None else model
    for link in reversed(links):
        model = _with_delta(model, *link)
    return model


def _with_delta(
    base: OpenedModel, folder: Path, manifest: DeltaManifest, sha256: str
) -> OpenedModel:
    """What a base and a delta are together."""
    rows = base.lookup
    assert isinstance(rows, MappedRows), "deltas begin at exports"
    watch = watched(folder, manifest.files)
    for name, digest in manifest.files.items():
        verify_file(folder, name, digest, EXPORT)
    export = rows.manifest
    versions = opened_rows(folder, manifest.rows, rows.num_rows, export.dim, export.dtype)
    ids = read_ids(folder, export.tables, is_delta=True)
    state = load_tensors(folder, DENSE, EXPORT)
    watch.check_names()
    return replace(
        base,
        source=str(folder),
        version=manifest.version,
        step=manifest.step,
        lookup=rows.changed(versions, ids) if versions or ids else rows,
        dense=dense_layers(rows.manifest.model, base.schema, rows.features, state, str(folder)),
        bf16=manifest.bf16,
        sha256=sha256,
        files=watch if base.files is None else base.files.joined(watch),
        event_time=event_time_of(folder),
        root=base.root or replace(base, dense=nn.Identity()),
    )
