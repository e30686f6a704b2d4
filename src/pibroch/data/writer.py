"""Writes an encoded dataset: samples in order, then the manifest that makes it one.

Layout of the folder, all arrays raw and little-endian::

    dataset.json                     what is here (see Manifest)
    tables/<feature>.codes.u64       code of rows 2, 3, ... (vocabulary only)
    tables/<feature>.counts.i64      accesses of each row in the training split
    <split>/labels.u8                [N]
    <split>/dense.f32                [N, n]
    <split>/ids.i32                  [N, F1], of the F1 features that are not multi-hot
    <split>/<feature>.values.i32     [V], of a multi-hot feature
    <split>/<feature>.offsets.i64    [N + 1], of the same
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pibroch.data.schema import Schema
from pibroch.data.splits import SPLITS
from pibroch.data.storage import ArrayFile, checksum, write_json
from pibroch.kernels.arrays import Array
from pibroch.storage import storage_errors

FORMAT_VERSION = 1
MANIFEST = "dataset.json"


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """R encoded samples.

    Attributes:
        labels: uint8 ``[R]``.
        dense: float32 ``[R, n]``, transformed.
        ids: int32 ``[R, F1]``, the features that are not multi-hot.
        bags: for each multi-hot feature lengths int64 ``[R]`` and values int32 ``[V]``.
    """

    labels: NDArray[np.uint8]
    dense: NDArray[np.float32]
    ids: NDArray[np.int32]
    bags: dict[str, tuple[NDArray[np.int64], NDArray[np.int32]]] = field(default_factory=dict)

    def chosen(self, mask: NDArray[np.bool_]) -> EncodedRows:
        """The samples where ``mask [R]`` holds."""
        bags = {
            name: (lengths[mask], values[np.repeat(mask, lengths)])
            for name, (lengths, values) in self.bags.items()
        }
        return EncodedRows(self.labels[mask], self.dense[mask], self.ids[mask], bags)


@dataclass(frozen=True, slots=True)
class Totals:
    """How far a dataset is written: samples by split, items by split and multi-hot feature."""

    samples: dict[str, int]
    items: dict[str, dict[str, int]]

    @classmethod
    def zero(cls, schema: Schema) -> Totals:
        """Nothing written."""
        names = [feature.name for feature in schema.categorical if feature.multi_hot]
        return cls(dict.fromkeys(SPLITS, 0), {split: dict.fromkeys(names, 0) for split in SPLITS})


class DatasetWriter:
    """Appends samples to the splits of a dataset.

    Args:
        folder: where the dataset grows.
        schema: its features.
        totals: what is already there, when an interrupted writing goes on.
    """

    def __init__(self, folder: Path, schema: Schema, totals: Totals | None = None) -> None:
        self.folder = folder
        self.schema = schema
        self.totals = totals or Totals.zero(schema)
        self._widths = {"labels.u8": 1, "dense.f32": len(schema.dense)}
        self._widths["ids.i32"] = sum(not feature.multi_hot for feature in schema.categorical)
        self._files: dict[str, ArrayFile] = {}
        for split in SPLITS:
            for name in self._widths:
                self._open(f"{split}/{name}")
            for feature in self.totals.items[split]:
                self._open(f"{split}/{feature}.values.i32")
                self._open(f"{split}/{feature}.offsets.i64").write_at(0, np.zeros(1, np.int64))

    def append(self, split: str, rows: EncodedRows) -> None:
        """Write samples behind those of the split.

        Raises:
            StorageError: when the disk refuses.
        """
        first = self.totals.samples[split]
        arrays: dict[str, Array] = {
            "labels.u8": rows.labels,
            "dense.f32": rows.dense,
            "ids.i32": rows.ids,
        }
        for name, array in arrays.items():
            self._files[f"{split}/{name}"].write_at(first * self._widths[name], array)
        for feature, (lengths, values) in rows.bags.items():
            start = self.totals.items[split][feature]
            self._files[f"{split}/{feature}.values.i32"].write_at(start, values)
            self._files[f"{split}/{feature}.offsets.i64"].write_at(
                first + 1, start + np.cumsum(lengths)
            )
            self.totals.items[split][feature] = start + len(values)
        self.totals.samples[split] = first + len(rows.labels)

    def write_table(
        self, feature: str, counts: NDArray[np.int64], codes: NDArray[np.uint64] | None = None
    ) -> None:
        """Write accesses of each row of a table in training and, for a vocabulary, its codes."""
        write_table(self.folder, feature, counts, codes)

    def finish(
        self,
        num_rows: dict[str, int],
        provenance: dict[str, Any],
        truth: dict[str, Any] | None = None,
        has_labels: bool = True,
    ) -> None:
        """Close the arrays and write the manifest with their sizes and checksums.

        Args:
            num_rows: rows of each feature's table.
            provenance: where the data came from, for people.
            truth: of generated data the best possible metrics per split.
            has_labels: false where those that were appended mean nothing.
        """
        for name, file in self._files.items():
            file.close(self._num_items(name))
        paths = sorted(path for path in self.folder.glob("*/*") if path.is_file())
        files = {
            str(path.relative_to(self.folder)): [path.stat().st_size, checksum(path)]
            for path in paths
        }
        manifest = {
            "format": "pibroch-dataset",
            "version": FORMAT_VERSION,
            "fingerprint": fingerprint(self.schema, num_rows, self.folder),
            "samples": self.totals.samples,
            "items": self.totals.items,
            "has_labels": has_labels,
            "num_rows": num_rows,
            "truth": truth,
            "provenance": provenance,
            "schema": self.schema.model_dump(),
            "files": files,
        }
        write_json(self.folder / MANIFEST, manifest)

    def _open(self, name: str) -> ArrayFile:
        self._files[name] = ArrayFile(self.folder / name, _dtype_of(name))
        return self._files[name]

    def _num_items(self, name: str) -> int:
        split, array = name.split("/")
        if array in self._widths:
            return self.totals.samples[split] * self._widths[array]
        feature, kind, _ = array.split(".")
        return (
            self.totals.items[split][feature]
            if kind == "values"
            else self.totals.samples[split] + 1
        )


def write_table(
    folder: Path, feature: str, counts: NDArray[np.int64], codes: NDArray[np.uint64] | None = None
) -> None:
    """Write ``tables/<feature>.*``; the counts come last and say that the table is whole."""
    arrays = [("codes.u64", codes), ("counts.i64", counts)]
    for kind, array in arrays:
        if array is not None:
            path = folder / "tables" / f"{feature}.{kind}"
            temporary = path.with_name(path.name + ".new")
            with storage_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                array.astype(_dtype_of(path.name)).tofile(temporary)
                temporary.replace(path)


def fingerprint(schema: Schema, num_rows: dict[str, int], folder: Path) -> str:
    """A hash over what a checkpoint depends on: features, encodings, table sizes, vocabularies."""
    content: dict[str, object] = {
        "dense": [feature.model_dump() for feature in schema.dense],
        "categorical": [feature.model_dump() for feature in schema.categorical],
        "num_rows": num_rows,
    }
    if schema.text_rules > 1 and any(feature.encoding == "hash" for feature in schema.categorical):
        # a vocabulary shows by itself what its values are
        content["text_rules"] = schema.text_rules
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for feature in schema.categorical:
        path = folder / "tables" / f"{feature.name}.codes.u64"
        if path.exists():
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:32]


def _dtype_of(name: str) -> str:
    kind = name.rsplit(".", 1)[1]
    return {"u8": "<u1", "u64": "<u8", "i32": "<i4", "i64": "<i8", "f32": "<f4"}[kind]
