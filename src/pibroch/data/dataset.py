"""An encoded dataset on disk, memory-mapped. See ``writer`` for the layout."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from pibroch.config.base import Section
from pibroch.data.counted import Counted, all_counts
from pibroch.data.encode import FeatureEncoder
from pibroch.data.line_runs import WIDTH
from pibroch.data.mapped import FileIdentity, MappedFiles
from pibroch.data.schema import SavedSchema
from pibroch.data.splits import SPLITS
from pibroch.data.storage import checksum
from pibroch.data.transform import FIRST_ROW
from pibroch.data.writer import (
    EVENT_TIMES,
    FORMAT_VERSION,
    GROUPS,
    LINES,
    MANIFEST,
    RAW_IDS,
    WEIGHTS,
    kept_name,
    label_file,
    values_file,
)
from pibroch.errors import DataError
from pibroch.kernels.arrays import Array
from pibroch.untrusted import InnerPath, Refusal, checked, open_file, read_json

SplitName = Literal["train", "validation", "test"]
SCORE_COLUMNS = ("sample", "file", "line", "label", "score", "logit")
"""Of files of scores, besides those that were passed through, whose names are others."""
DATASET = Refusal(DataError, "prepare the dataset again with --overwrite")
"""How damaged datasets are refused."""
_Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 48)]


class DatasetManifest(Section):
    """What is in a dataset.

    Attributes:
        format: always ``pibroch-dataset``.
        version: of the layout.
        fingerprint: of schema, table sizes and vocabularies.
        samples: of each split.
        items: of each split and multi-hot feature.
        num_rows: of each table, ``None`` where its ids are raw.
        truth: see :class:`EncodedDataset`.
        provenance: where the data came from.
        schema_: ``schema`` in the file.
        has_labels: see :class:`EncodedDataset`.
        kept: see :class:`EncodedDataset`.
        files: of every other file size and CRC-32.
    """

    format: Literal["pibroch-dataset"]
    version: Literal[1]
    fingerprint: str
    samples: dict[SplitName, _Count]
    items: dict[SplitName, dict[str, _Count]]
    num_rows: dict[str, Annotated[int, Field(strict=True, ge=FIRST_ROW, lt=1 << 31)] | None]
    truth: dict[str, dict[str, float]] | None
    provenance: dict[str, Any]
    schema_: SavedSchema = Field(alias="schema")
    has_labels: bool = True
    kept: tuple[str, ...] = ()
    files: dict[InnerPath, tuple[_Count, _Count]]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        features = self.schema_.categorical
        multi_hot = {feature.name for feature in features if feature.multi_hot}
        multi_hot |= set(map(kept_name, range(len(self.kept))))
        if self.samples.keys() != set(SPLITS) or self.items.keys() != set(SPLITS):
            raise ValueError(f"samples and items of {', '.join(SPLITS)}")
        if any(items.keys() != multi_hot for items in self.items.values()):
            raise ValueError("items of each multi-hot feature and kept column")
        if taken_names(self.kept):
            raise ValueError("kept columns of other names than files of scores have")
        if self.num_rows.keys() != self.schema_.readers.keys():
            raise ValueError("rows of each categorical feature's table")
        for feature in self.schema_.owners:
            if feature.is_raw != (self.num_rows[feature.name] is None):
                raise ValueError(f"rows of table {feature.name!r}, or null where its ids are raw")
            if feature.fixed_num_rows not in (None, self.num_rows[feature.name]):
                raise ValueError(f"{feature.fixed_num_rows} rows of table {feature.name!r}")
        return self


def taken_names(kept: Sequence[str]) -> list[str]:
    """Columns that cannot be passed through, as files of scores have such already.

    >>> taken_names(["id", "line", "score.clicked", "id"])
    ['line', 'score.clicked', 'id']
    """
    taken = [name for name in kept if name.partition(".")[0] in SCORE_COLUMNS]
    return taken + [name for place, name in enumerate(kept) if name in kept[:place]]


@dataclass(frozen=True, slots=True)
class Bags:
    """A multi-hot feature: the ids of sample ``i`` are ``values[offsets[i] : offsets[i + 1]]``."""

    values: NDArray[np.int32] | NDArray[np.int64]
    offsets: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KeptTexts:
    """A column that was passed through; of sample ``i`` ``text[offsets[i] : offsets[i + 1]]``."""

    text: NDArray[np.uint8]
    offsets: NDArray[np.int64]

    def between(self, first: int, end: int) -> list[str]:
        """Of samples ``first`` to ``end``; escaped where they are no UTF-8."""
        offsets = self.offsets[first : end + 1]
        text = self.text[offsets[0] : offsets[-1]].tobytes()
        bounds = (offsets - offsets[0]).tolist()
        return [
            text[start:end].decode("utf-8", "backslashreplace") for start, end in pairwise(bounds)
        ]


@dataclass(frozen=True, slots=True)
class Split:
    """The samples of one split; arrays are read-only maps of files.

    Attributes:
        name: train, validation or test.
        keys: the F categorical features.
        dense_names: the n dense features.
        labels: uint8 ``[N]`` of one label of 0 and 1; float32 ``[N]`` of numbers, ``[N, T]`` where
            there are several.
        dense: float32 ``[N, n]``.
        ids: int32 ``[N, F1]``, the features that are not multi-hot and whose ids are rows, in the
            order of ``keys``.
        bags: the multi-hot features by name.
        files: those that are mapped; ``None`` for arrays in memory.
        raw_ids: int64 ``[N, F2]``, as ``ids``, of those whose ids are raw.
        raw_keys: the F2 names.
        sample_weights: float32 ``[N]``; ``None`` for all ones.
        groups: uint64 ``[N]``, which samples are ranked among each other; ``None`` where the schema
            has no groups.
        event_times: int64 ``[N]``, milliseconds since 1970; ``None`` where the schema has no time.
        kept: columns that were passed through, by name.
        lines: int64 ``[K, 3]``, see :mod:`pibroch.data.line_runs`; ``None`` where samples come from
            no lines.
    """

    name: str
    keys: tuple[str, ...]
    dense_names: tuple[str, ...]
    labels: NDArray[np.uint8] | NDArray[np.float32]
    dense: NDArray[np.float32]
    ids: NDArray[np.int32]
    bags: Mapping[str, Bags]
    files: MappedFiles | None = None
    raw_ids: NDArray[np.int64] | None = None
    raw_keys: tuple[str, ...] = ()
    sample_weights: NDArray[np.float32] | None = None
    groups: NDArray[np.uint64] | None = None
    event_times: NDArray[np.int64] | None = None
    kept: Mapping[str, KeptTexts] = field(default_factory=dict)
    lines: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def single_keys(self) -> tuple[str, ...]:
        """The features that are not multi-hot, in the order of ``keys``."""
        return tuple(key for key in self.keys if key not in self.bags)

    def ids_of(self, key: str) -> Array:
        """All ids of one feature, ``[V]``; a view."""
        if key in self.bags:
            return self.bags[key].values
        if self.raw_ids is not None and key in self.raw_keys:
            return self.raw_ids[:, self.raw_keys.index(key)]
        return self.ids[:, [k for k in self.single_keys if k not in self.raw_keys].index(key)]


class EncodedDataset:
    """A prepared or generated dataset.

    Attributes:
        path: its folder.
        schema: its features.
        num_rows: rows of each table, by the name of the feature that has it; ``None`` where its ids
            are raw.
        samples: samples in each split.
        fingerprint: a hash over what a checkpoint depends on: features, encodings, table sizes,
            vocabularies.
        provenance: where the data came from.
        has_labels: false where the data can be scored alone; their labels are then 0.
        kept: columns that were passed through.
        truth: of generated data, per split, the metrics of a model that knows the true
            probabilities; else ``None``.
    """

    def __init__(self, path: Path, manifest: DatasetManifest) -> None:
        self.path = path
        self.schema = manifest.schema_
        self.num_rows = manifest.num_rows
        self.samples = {str(name): count for name, count in manifest.samples.items()}
        self.fingerprint = manifest.fingerprint
        self.provenance = manifest.provenance
        self.truth = manifest.truth
        self.has_labels = manifest.has_labels
        self.kept = manifest.kept
        self._items = {str(name): items for name, items in manifest.items.items()}
        self._files = manifest.files
        self._opened: dict[str, FileIdentity] = {}

    @classmethod
    def open(cls, path: str | Path) -> EncodedDataset:
        """Open a dataset, and check its manifest and the sizes of its files.

        :meth:`verify` checks their contents.

        Raises:
            DataError: when there is none, or it is damaged or of another version.
        """
        path = Path(path)
        if not (path / MANIFEST).exists():
            need = "a dataset made by `pibroch data prepare` or `synthesize`"
            raise DataError(
                f"{path}, which has no {MANIFEST}", need, "check the path, or prepare it"
            )
        content = read_json(path, MANIFEST, DATASET)
        source = str(path / MANIFEST)
        kind = content.get("format") if isinstance(content, dict) else None
        if kind != "pibroch-dataset":
            raise DATASET(f"{source} of another kind", "a dataset")
        if content.get("version") != FORMAT_VERSION:
            got = f"{path} of format version {str(content.get('version'))[:20]}"
            raise DATASET(got, f"version {FORMAT_VERSION}")
        dataset = cls(path, checked(DatasetManifest, content, source, DATASET))
        dataset._check_sizes()
        return dataset

    def split(self, name: SplitName) -> Split:
        """The samples of one split.

        Raises:
            DataError: when there is no split of this name, or its files were replaced since the
                dataset was opened.
        """
        if name not in SPLITS:
            raise DataError(f"split `{name}`", f"one of {', '.join(SPLITS)}", "correct the name")
        count = self.samples[name]
        schema = self.schema
        num_labels = len(schema.label_columns)
        files = MappedFiles(self.path, self._opened)
        single, raw = (schema.single_keys(raw) for raw in (False, True))
        bags = {
            feature.name: Bags(
                self._map(
                    f"{name}/{values_file(feature)}",
                    "<i8" if feature.is_raw else "<i4",
                    (self._items[name][feature.name],),
                    files,
                ),
                self._map(f"{name}/{feature.name}.offsets.i64", "<i8", (count + 1,), files),
            )
            for feature in self.schema.categorical
            if feature.multi_hot
        }
        return Split(
            name,
            schema.keys,
            schema.dense_names,
            self._map(
                f"{name}/{label_file(schema)}",
                "u1" if schema.is_binary else "<f4",
                (count, num_labels) if num_labels > 1 else (count,),
                files,
            ),
            self._map(f"{name}/dense.f32", "<f4", (count, len(schema.dense)), files),
            self._map(f"{name}/ids.i32", "<i4", (count, len(single)), files),
            bags,
            files,
            self._map(f"{name}/{RAW_IDS}", "<i8", (count, len(raw)), files) if raw else None,
            raw,
            None
            if schema.weight is None
            else self._map(f"{name}/{WEIGHTS}", "<f4", (count,), files),
            None if schema.group is None else self._map(f"{name}/{GROUPS}", "<u8", (count,), files),
            None
            if schema.time is None
            else self._map(f"{name}/{EVENT_TIMES}", "<i8", (count,), files),
            self._kept(name, files),
            self._lines(name, files),
        )

    def _kept(self, split: SplitName, files: MappedFiles) -> dict[str, KeptTexts]:
        count = self.samples[split] + 1
        return {
            column: KeptTexts(
                self._map(f"{split}/{name}.values.u8", "u1", (self._items[split][name],), files),
                self._map(f"{split}/{name}.offsets.i64", "<i8", (count,), files),
            )
            for column, name in ((each, kept_name(k)) for k, each in enumerate(self.kept))
        }

    def _lines(self, split: SplitName, files: MappedFiles) -> NDArray[np.int64] | None:
        name = f"{split}/{LINES}"
        if name not in self._files:
            return None
        size, _ = self._files[name]
        return self._map(name, "<i8", (size // (8 * WIDTH), WIDTH), files)

    def access_counts(self, table: str) -> NDArray[np.int64]:
        """How often training reads each row of a table, int64 ``[num_rows]``.

        Raises:
            DataError: as :meth:`accesses`.
        """
        accessed = self.accesses(table)
        return all_counts(accessed, self.known_num_rows[table])

    def accesses(self, table: str) -> Counted:
        """The rows of a table that training reads, and how often; O(rows that it reads).

        Raises:
            DataError: when there is no such table, or its ids are raw.
        """
        if table not in self.num_rows:
            raise DataError(
                f"table `{table}`", f"one of {', '.join(self.num_rows)}", "correct the name"
            )
        num_rows = self.num_rows[table]
        if num_rows is None:
            raise DataError(
                f"table `{table}` with raw ids, whose accesses nobody counted",
                "one with rows",
                "prepare it with a vocabulary, or as a hash",
            )
        rows_file = f"tables/{table}.rows.i64"
        if rows_file not in self._files:
            counts = self._map(f"tables/{table}.counts.i64", "<i8", (num_rows,))
            rows = np.flatnonzero(counts)
            return Counted(rows, counts[rows])
        num_accessed = self._files[rows_file][0] // 8
        rows = self._map(rows_file, "<i8", (num_accessed,))
        if num_accessed and (rows[0] < 0 or rows[-1] >= num_rows or (np.diff(rows) <= 0).any()):
            raise DATASET(f"{self.path / rows_file} of other numbers", f"rows below {num_rows:,}")
        return Counted(rows, self._map(f"tables/{table}.counts.i64", "<i8", (num_accessed,)))

    @property
    def known_num_rows(self) -> dict[str, int]:
        """Rows of each feature's table, of those alone whose ids are rows."""
        return {name: rows for name, rows in self.num_rows.items() if rows is not None}

    @cached_property
    def encoders(self) -> dict[str, FeatureEncoder]:
        """For each feature what turns raw values into rows, for serving."""
        return {
            feature.name: FeatureEncoder(
                feature,
                self.codes(feature.table) if feature.has_vocabulary else None,
                text_rules=self.schema.text_rules,
                nulls=self.schema.null_texts,
            )
            for feature in self.schema.categorical
        }

    def codes(self, table: str) -> NDArray[np.uint64]:
        """Codes of rows 2, 3, ... of a table with a vocabulary, uint64 ``[num_rows - 2]``."""
        num_codes = self.known_num_rows[table] - FIRST_ROW
        return np.array(self._map(f"tables/{table}.codes.u64", "<u8", (num_codes,)))

    @cached_property
    def digest(self) -> str:
        """A hash over all contents, by the checksums in the manifest.

        Two copies of a dataset have the same, and so has one of other files with the same records.
        """
        contents = {name: file for name, file in self._files.items() if not name.endswith(LINES)}
        return hashlib.sha256(
            json.dumps([self.fingerprint, contents], sort_keys=True).encode()
        ).hexdigest()

    @cached_property
    def sources_digest(self) -> str:
        """A hash over :attr:`digest`, and over which line of which file each sample is."""
        lines = {name: file for name, file in self._files.items() if name.endswith(LINES)}
        about = [self.digest, lines, self.sources, self.kept]
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()

    @property
    def sources(self) -> tuple[str, ...]:
        """The files that it was prepared from, as they were given; none of generated data."""
        sources = self.provenance.get("sources")
        return tuple(map(str, sources)) if isinstance(sources, list) else ()

    @property
    def best_possible_auc(self) -> dict[str, float] | None:
        """AUC of the true probabilities of generated data by split; ``None`` for other data.

        No model beats it but by luck.
        """
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
                got = f"{self.path / name}, whose contents have changed"
                raise DATASET(got, "the bytes that were written")

    def _check_sizes(self) -> None:
        for name, (size, _) in self._files.items():
            with open_file(self.path, name, DATASET) as file:
                identity = FileIdentity.of(file.fileno())
            if identity is None or identity.size_bytes != size:
                got = "missing" if identity is None else f"{identity.size_bytes:,} bytes long"
                raise DATASET(f"{self.path / name}, {got}", f"{size:,} bytes")
            self._opened[name] = identity

    def _map(
        self, name: str, dtype: str, shape: Sequence[int], files: MappedFiles | None = None
    ) -> Array:
        path = self.path / name
        shape = tuple(shape)
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        if name not in self._files or self._files[name][0] != num_bytes:
            raise DATASET(
                f"{path} that does not fit the manifest", f"an array of shape {list(shape)}"
            )
        files = files or MappedFiles(self.path, self._opened)
        return files.map(name, dtype, shape) if num_bytes else np.empty(shape, dtype)
