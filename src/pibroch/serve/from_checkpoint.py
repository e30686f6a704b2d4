"""A model from a checkpoint.

All weights in this process's memory, averages where the run kept them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from pibroch.collectives import Channel
from pibroch.config import RunConfig
from pibroch.data import EncodedDataset
from pibroch.data.vocabularies import Vocabularies
from pibroch.embedding import SGD, Table, Zeros
from pibroch.embedding.row_index import (
    LearningIndex,
    kind_of,
    load_state,
    must_be_rows,
)
from pibroch.errors import CheckpointError, DataError
from pibroch.exchange import Embeddings
from pibroch.models.build import pooling_of
from pibroch.models.losses import logit_labels
from pibroch.serve.model import OpenedModel, dense_layers
from pibroch.state.checkpoint import dense_weights, load_rows
from pibroch.state.checkpoint_folder import find_checkpoint
from pibroch.state.dense import ROW_INDICES, load_row_indices, tensors_in
from pibroch.state.files import CHECKPOINT, verify_files
from pibroch.state.manifest import MANIFEST, Manifest, read_manifest, schema_of
from pibroch.state.tables import check_tables_match, saved_tables


def open_checkpoint(path: Path, data: Path | None = None) -> OpenedModel:
    """Load a checkpoint, every byte of it verified, or the best one of a run directory.

    Args:
        path: a checkpoint folder or a run directory.
        data: the dataset that it was trained on, for its dictionaries; where the run found it when
            absent.

    Raises:
        CheckpointError: when it is missing, damaged, or not of this version's models; or was
            trained on other ``data``.
        DataError: when there is no dataset at ``data``.
    """
    folder = find_checkpoint(path)
    manifest = read_verified(folder)
    config = manifest.config
    schema = schema_of(manifest)
    if odd := sorted(manifest.tables.keys() ^ schema.readers.keys()):
        raise CHECKPOINT(
            f"{folder}, whose tables and schema differ in {odd[0]!r}", "a table for each feature"
        )
    embeddings = load_embeddings(folder, manifest)
    return OpenedModel(
        source=str(folder),
        version=version_of(folder, manifest),
        step=manifest.progress.step,
        event_time=manifest.progress.event_time,
        schema=schema,
        fingerprint=manifest.dataset_fingerprint,
        features=embeddings.features,
        dim=embeddings.row_space.dim,
        lookup=embeddings,
        dense=saved_dense(folder, manifest),
        bf16=config.train.bf16,
        vocabularies=vocabularies_of(manifest, data),
        logit_labels=logit_labels(config, schema),
        config=config,
    )


def read_verified(folder: Path) -> Manifest:
    """The manifest of a checkpoint all of whose files are as they were saved.

    Raises:
        DamagedCheckpointError: when one is missing or damaged.
        CheckpointError: when it is of another format.
    """
    manifest = read_manifest(folder)
    verify_files(folder, manifest.files)
    return manifest


def version_of(folder: Path, manifest: Manifest) -> str:
    """A name of a checkpoint's weights, such as ``1125-0c3f9a51``."""
    checksum = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    return f"{manifest.progress.step}-{checksum[:8]}"


def vocabularies_of(manifest: Manifest, data: Path | None = None) -> Vocabularies | None:
    """The dictionaries of a checkpoint.

    Its schema alone where that suffices, else from the dataset that it was trained on.

    Args:
        manifest: of the checkpoint.
        data: that dataset; where the run found it when absent.

    Returns:
        ``None`` when nobody said where the dataset is and it is no longer where the run found it.

    Raises:
        CheckpointError: when ``data`` is another dataset.
        DataError: when there is no dataset at ``data``.
    """
    schema = schema_of(manifest)
    fingerprint = manifest.dataset_fingerprint
    if data is not None:
        dataset = EncodedDataset.open(data)
        if dataset.fingerprint != fingerprint:
            raise CheckpointError(
                f"data {dataset.fingerprint[:12]} in {data}, whose vocabularies or encodings are"
                " not the checkpoint's",
                f"data {fingerprint[:12]}, on which it was trained",
                "pass that data",
            )
        return Vocabularies.of_dataset(dataset)
    if not any(feature.has_vocabulary for feature in schema.categorical):
        return Vocabularies(schema, fingerprint, {})
    if manifest.config.data.dir is None:
        return None
    try:
        there = EncodedDataset.open(manifest.config.data.dir)
    except DataError:
        return None
    return Vocabularies.of_dataset(there) if there.fingerprint == fingerprint else None


def saved_dense(folder: Path, manifest: Manifest) -> nn.Module:
    """The dense layers of a checkpoint, from files that were verified."""
    schema = schema_of(manifest)
    state = dense_weights(folder, manifest)
    return dense_layers(manifest.config.model, schema, schema.keys_by_table, state, str(folder))


def plain_table(
    name: str, num_rows: int, dim: int, config: RunConfig, features: tuple[str, ...] = ()
) -> Table:
    """A float32 table for a checkpoint's weights or their averages."""
    dtype = config.embedding.dtype if config.train.average is None else "float32"
    rows = kind_of(config.embedding.rows_of(name))
    pooling = pooling_of(config.model)
    return Table(name, num_rows, dim, features, pooling, Zeros(), dtype, rows)


def saved_indices(folder: Path, manifest: Manifest) -> dict[str, LearningIndex]:
    """The row indices of a verified checkpoint's tables of raw ids.

    Args:
        folder: of the checkpoint.
        manifest: its own.

    Raises:
        ConfigError: for another kind of index that is not of rows.
    """
    others: dict[str, Mapping[str, Any]] = {}
    learning: dict[str, LearningIndex] = {}
    for name, saved in manifest.tables.items():
        if saved.index is not None:
            index = kind_of(manifest.config.embedding.rows_of(name)).index(saved.num_rows)
            if isinstance(index, LearningIndex):
                learning[name] = index
            else:
                others[name] = saved.index
    must_be_rows(
        others, "an export", "serve or predict from the checkpoint itself: pass it as --checkpoint"
    )
    if learning:
        state = tensors_in(folder)(ROW_INDICES)
        load_state(learning, {name: each.numpy() for name, each in state.items()})
    return learning


def load_embeddings(folder: Path, manifest: Manifest, channel: Channel | None = None) -> Embeddings:
    """A checkpoint's tables for inference, without optimizer state, from files that were verified.

    Args:
        folder: the checkpoint.
        manifest: its own.
        channel: between ranks that share the tables by rows, each of which calls this; all in this
            process when absent.
    """
    readers = schema_of(manifest).readers
    tables = [
        plain_table(name, saved.num_rows, saved.dim, manifest.config, readers.get(name, ()))
        for name, saved in manifest.tables.items()
    ]
    check_tables_match(manifest.tables, saved_tables(tables, SGD(lr=1.0)), same_state=False)
    exchange = "local" if channel is None else "alltoall"  # whose default placement is by rows
    embeddings = Embeddings(tables, SGD(lr=1.0), exchange, channel=channel)
    load_rows(folder, manifest, embeddings.pieces())
    load_row_indices(tensors_in(folder), embeddings)
    return embeddings.eval()
