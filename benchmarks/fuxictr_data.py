"""An encoded dataset, and trained weights, as FuxiCTR's side of topic ``models`` reads them.

Shape legend: N samples, T positions of a sequence, R rows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import pibroch as pb
from benchmarks.model_cases import DATASET, LAYER, SCORES, TABLE
from pibroch.config.run import RunConfig
from pibroch.data import EncodedDataset, Loader
from pibroch.data.dataset import Bags, SplitName
from pibroch.kernels.arrays import Array, Ints
from pibroch.serve.from_checkpoint import open_checkpoint
from pibroch.train.session import build_session

LABEL = "label"
FILES: dict[SplitName, str] = {"train": "train", "validation": "valid", "test": "test"}


def write_dataset(dataset: EncodedDataset, folder: Path) -> None:
    """Write ``feature_map.json`` and each split as ``.npz``.

    Rows of tables that sequences read are counted from 1 on: FuxiCTR pads sequences with 0.
    """
    folder.mkdir()
    features = [{name: spec} for name, spec in _specs(dataset).items()]
    described = {"dataset_id": DATASET, "labels": [LABEL], "features": features}
    (folder / "feature_map.json").write_text(json.dumps(described))
    for name, file in FILES.items():
        np.savez(folder / f"{file}.npz", allow_pickle=False, **_columns(dataset, name))


def padded_tables(dataset: EncodedDataset) -> set[str]:
    """Tables that sequences read."""
    return {each.table for each in dataset.schema.categorical if each.multi_hot}


def _specs(dataset: EncodedDataset) -> dict[str, dict[str, Any]]:
    schema = dataset.schema
    padded = padded_tables(dataset)
    specs: dict[str, dict[str, Any]] = {name: {"type": "numeric"} for name in schema.dense_names}
    for feature in schema.categorical:
        rows = dataset.known_num_rows[feature.table]
        spec: dict[str, Any] = {"type": "categorical", "vocab_size": rows}
        if feature.table in padded:
            spec |= {"vocab_size": 1 + rows, "padding_idx": 0}
        if feature.multi_hot:
            length = feature.max_length
            spec |= {"type": "sequence", "max_len": length, "share_embedding": feature.table}
        specs[feature.name] = spec
    return {name: {"source": "", **spec} for name, spec in specs.items()}


def _columns(dataset: EncodedDataset, name: SplitName) -> dict[str, Array]:
    """Columns ``[N]``, of sequences ``[N, T]``."""
    split = dataset.split(name)
    padded = padded_tables(dataset)
    columns: dict[str, Array] = dict(zip(split.dense_names, split.dense.T, strict=True))
    for feature in dataset.schema.categorical:
        if feature.multi_hot:
            assert feature.max_length is not None, "sequences here have one"
            columns[feature.name] = padded_sequences(split.bags[feature.name], feature.max_length)
        else:
            columns[feature.name] = split.ids_of(feature.name) + (feature.table in padded)
    return columns | {LABEL: split.labels}


def padded_sequences(bags: Bags, length: int) -> Ints:
    """Rows counted from 1 on, then zeros, ``[N, T]``.

    >>> padded_sequences(Bags(np.array([4, 0, 9]), np.array([0, 2, 2, 3])), 2).tolist()
    [[5, 1], [0, 0], [10, 0]]
    """
    lengths = np.diff(bags.offsets)
    out = np.zeros((len(lengths), length), np.int64)
    out[np.arange(length) < lengths[:, None]] = bags.values + 1
    return out


def write_start(config: RunConfig, dataset: EncodedDataset, path: Path) -> None:
    """Write the weights with which a run of pibroch's begins, see :func:`_weights`."""
    session = build_session(config, dataset)
    np.savez(path, allow_pickle=False, **_weights(session.embeddings, session.model))


def write_weights(run: Path, dataset: EncodedDataset, path: Path) -> None:
    """Write the best model of a run, see :func:`_weights`, and its scores of the test split."""
    opened = open_checkpoint(run)
    assert isinstance(opened.lookup, pb.Embeddings), "those of a checkpoint"
    predictor = pb.Predictor(opened)
    batches = Loader(dataset.split("test"), 8192)
    scores = torch.cat([predictor.scores(batch) for batch in batches]).numpy()
    arrays = _weights(opened.lookup, opened.dense) | {SCORES: scores}
    np.savez(path, allow_pickle=False, **arrays)


def _weights(embeddings: pb.Embeddings, layers: nn.Module) -> dict[str, Array]:
    """Tables ``[R, D]`` by their features, layers by their number."""
    arrays: dict[str, Array] = {}
    for table in embeddings.tables:
        (rows,) = embeddings.full_state_dict([table.name]).values()
        for feature in table.features:
            arrays[TABLE + feature] = rows.numpy()
    for number, parameter in enumerate(layers.parameters()):
        arrays[f"{LAYER}{number}"] = parameter.detach().numpy()
    return arrays
