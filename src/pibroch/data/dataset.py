"""An encoded dataset on disk, memory-mapped. See ``writer`` for the layout."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pibroch.data.encode import FeatureEncoder
from pibroch.data.mapped import FileIdentity, MappedFiles
from pibroch.data.schema import Schema
from pibroch.data.splits import SPLITS
from pibroch.data.storage import checksum
from pibroch.data.transform import FIRST_ROW
from pibroch.data.writer import FORMAT_VERSION, MANIFEST
from pibroch.errors import DataError, PibrochError
from pibroch.kernels.arrays import Array

SplitName = Literal["train", "validation", "test"]
_DO = "prepare the dataset again with --overwrite"


@dataclass(frozen=True, slots=True)
class Bags:
    """A multi-hot feature: the ids of sample ``i`` are ``values[offsets[i] : offsets[i + 1]]``."""

    values: NDArray[np.int32]
    offsets: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Split:
    """The samples of one split; arrays are read-only maps of files.

    Attributes:
        name: train, validation or test.
        keys: the F categorical features.
        dense_names: the n dense features.
        labels: uint8 ``[N]``.
        dense: float32 ``[N, n]``.
        ids: int32 ``[N, F1]``, the features that are not multi-hot, in the order of ``keys``.
        bags: the multi-hot features by name.
        files: those that are mapped; ``None`` for arrays in memory.
    """

    name: str
    keys: tuple[str, ...]
    dense_names: tuple[str, ...]
    labels: NDArray[np.uint8]
    dense: NDArray[np.float32]
    ids: NDArray[np.int32]
    bags: Mapping[str, Bags]
    files: MappedFiles | None = None

    def __len__(self) -> int:
        return len(self.labels)


class EncodedDataset:
    """A prepared or generated dataset.

    Attributes:
        path: its folder.
        schema: its features.
        num_rows: rows of each feature's table.
        samples: samples in each split.
        fingerprint: a hash over what a checkpoint depends on: features, encodings, table sizes, vocabularies.
        provenance: where the data came from.
        truth: of generated data, per split, the metrics of a model that knows the true probabilities; else ``None``.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.schema = Schema.of_manifest(manifest["schema"])
        self.num_rows: dict[str, int] = manifest["num_rows"]
        self.samples: dict[str, int] = manifest["samples"]
        self.fingerprint: str = manifest["fingerprint"]
        self.provenance: dict[str, object] = manifest["provenance"]
        self.truth: dict[str, dict[str, float]] | None = manifest["truth"]
        self._items: dict[str, dict[str, int]] = manifest["items"]
        self._files: dict[str, list[int]] = manifest["files"]
        self._opened: dict[str, FileIdentity] = {}

    @classmethod
    def open(cls, path: str | Path) -> EncodedDataset:
        """Open a dataset; checks the manifest and the size of each file, not their contents (see :meth:`verify`).

        Raises:
            DataError: when there is none, or it is damaged or of another version.
        """
        path = Path(path)
        need, do = (
            "a dataset made by `pibroch data prepare` or `synthesize`",
            "check the path, or prepare it",
        )
        try:
            manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise DataError(f"{path}, which has no {MANIFEST}", need, do) from error
        except (OSError, ValueError) as error:
            raise DataError(f"{path / MANIFEST}, unreadable: {error}", need, _DO) from error
        if not isinstance(manifest, dict) or manifest.get("format") != "pibroch-dataset":
            raise DataError(f"{path / MANIFEST} of another kind", need, do)
        if manifest["version"] != FORMAT_VERSION:
            raise DataError(
                f"{path} of format version {manifest['version']}", f"version {FORMAT_VERSION}", _DO
            )
        try:
            dataset = cls(path, manifest)
        except (KeyError, ValueError, PibrochError) as error:
            raise DataError(f"{path / MANIFEST}, damaged: {error}", need, _DO) from error
        dataset._check_sizes()
        return dataset

    def split(self, name: SplitName) -> Split:
        """The samples of one split.

        Raises:
            DataError: when there is no split of this name, or its files were replaced since the dataset was opened.
        """
        if name not in SPLITS:
            raise DataError(f"split `{name}`", f"one of {', '.join(SPLITS)}", "correct the name")
        count, files = self.samples[name], MappedFiles(self.path, self._opened)
        one_hot = [feature for feature in self.schema.categorical if not feature.multi_hot]
        bags = {
            feature: Bags(
                self._map(f"{name}/{feature}.values.i32", "<i4", (num_items,), files),
                self._map(f"{name}/{feature}.offsets.i64", "<i8", (count + 1,), files),
            )
            for feature, num_items in self._items[name].items()
        }
        return Split(
            name,
            self.schema.keys,
            self.schema.dense_names,
            self._map(f"{name}/labels.u8", "u1", (count,), files),
            self._map(f"{name}/dense.f32", "<f4", (count, len(self.schema.dense)), files),
            self._map(f"{name}/ids.i32", "<i4", (count, len(one_hot)), files),
            bags,
            files,
        )

    def access_counts(self, feature: str) -> NDArray[np.int64]:
        """How often training reads each row of a feature's table, int64 ``[num_rows]``."""
        if feature not in self.num_rows:
            raise DataError(
                f"feature `{feature}`", f"one of {', '.join(self.num_rows)}", "correct the name"
            )
        counts: NDArray[np.int64] = self._map(
            f"tables/{feature}.counts.i64", "<i8", (self.num_rows[feature],)
        )
        return counts

    @cached_property
    def encoders(self) -> dict[str, FeatureEncoder]:
        """For each feature what turns raw values into rows, for serving."""
        return {
            feature.name: FeatureEncoder(
                feature,
                None if feature.fixed_num_rows else self.codes(feature.name),
                text_rules=self.schema.text_rules,
            )
            for feature in self.schema.categorical
        }

    def codes(self, feature: str) -> NDArray[np.uint64]:
        """The codes of rows 2, 3, ... of a feature that has a vocabulary, uint64 ``[num_rows - 2]``."""
        return np.array(
            self._map(f"tables/{feature}.codes.u64", "<u8", (self.num_rows[feature] - FIRST_ROW,))
        )

    @cached_property
    def digest(self) -> str:
        """A hash over all contents, by the checksums in the manifest: two copies of a dataset have the same."""
        return hashlib.sha256(
            json.dumps([self.fingerprint, self._files], sort_keys=True).encode()
        ).hexdigest()

    @property
    def best_possible_auc(self) -> dict[str, float] | None:
        """AUC per split of the true probabilities of generated data, which no model can beat but by luck; else ``None``."""
        return (
            None
            if self.truth is None
            else {split: values["auc"] for split, values in self.truth.items()}
        )

    def verify(self) -> None:
        """Compare all contents with their checksums; reads the whole dataset.

        Raises:
            DataError: naming the first damaged file.
        """
        for name, (_, expected) in self._files.items():
            if checksum(self.path / name) != expected:
                raise DataError(
                    f"{self.path / name}, whose contents have changed",
                    "the bytes that were written",
                    _DO,
                )

    def _check_sizes(self) -> None:
        for name, (size, _) in self._files.items():
            path = self.path / name
            found = FileIdentity.of(path) if path.is_file() else None
            if found is None or found.size_bytes != size:
                got = "missing" if found is None else f"{found.size_bytes:,} bytes long"
                raise DataError(f"{path}, {got}", f"{size:,} bytes", _DO)
            self._opened[name] = found

    def _map(
        self, name: str, dtype: str, shape: Sequence[int], files: MappedFiles | None = None
    ) -> Array:
        path, shape = self.path / name, tuple(shape)
        num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if name not in self._files or self._files[name][0] != num_bytes:
            raise DataError(
                f"{path} that does not fit the manifest", f"an array of shape {list(shape)}", _DO
            )
        files = files or MappedFiles(self.path, self._opened)
        return files.map(name, dtype, shape) if num_bytes else np.empty(shape, dtype)
