"""The dictionaries of whatever a path holds: a dataset, an export, a checkpoint or a run."""

from __future__ import annotations

from pathlib import Path

from pibroch.data import EncodedDataset
from pibroch.data.vocabularies import Vocabularies
from pibroch.data.writer import MANIFEST
from pibroch.errors import CheckpointError
from pibroch.serve.from_checkpoint import vocabularies_of
from pibroch.serve.from_export import exported_vocabularies
from pibroch.state.checkpoint_folder import find_checkpoint
from pibroch.state.delta_format import is_exported
from pibroch.state.export_format import VOCABULARIES, read_export
from pibroch.state.files import verify_file
from pibroch.state.manifest import read_manifest
from pibroch.state.versions import chain_of


def find_vocabularies(path: Path) -> Vocabularies:
    """Schema and dictionaries of a dataset, an export, a checkpoint, or of a run's best one.

    Raises:
        CheckpointError: when the path holds none of these, or a checkpoint whose dataset is not
            where the run found it.
        DataError: for a damaged dataset.
    """
    if (path / MANIFEST).exists():
        return Vocabularies.of_dataset(EncodedDataset.open(path))
    if is_exported(path):
        export = chain_of(path)[-1]  # deltas share its dictionaries
        manifest = read_export(export)
        if VOCABULARIES in manifest.files:
            verify_file(export, VOCABULARIES, manifest.files[VOCABULARIES])
        vocabularies = exported_vocabularies(export, manifest)
    else:
        vocabularies = vocabularies_of(read_manifest(find_checkpoint(path)))
    if vocabularies is None:
        raise CheckpointError(
            f"{path}, whose dataset is not where it was trained on it",
            "what holds the dictionaries: a dataset or an export",
            "name that instead",
        )
    return vocabularies
