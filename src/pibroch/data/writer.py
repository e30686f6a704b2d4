"""Writes an encoded dataset: samples in order, then the manifest that makes it one.

Layout of the folder, all arrays raw and little-endian::

    dataset.json                     what is here (see Manifest)
    tables/<table>.codes.u64         code of rows 2, 3, ... (vocabulary only)
    tables/<table>.counts.i64        accesses of each row in the training split
    tables/<table>.rows.i64          the rows that these are of, rising; absent where they are all
    <split>/labels.u8                [N], of 0 and 1
    <split>/labels.f32               [N, T] instead, where there are several or one of any numbers
    <split>/sample_weights.f32       [N], where samples have weights
    <split>/groups.u64               [N], codes, where samples have groups
    <split>/event_times.i64          [N], milliseconds since 1970, where events have a time
    <split>/dense.f32                [N, n]
    <split>/ids.i32                  [N, F1], of the F1 features that are not multi-hot
    <split>/raw_ids.i64              [N, F2], of F2 others with raw ids; absent where there are none
    <split>/<feature>.values.i32     [V], of a multi-hot feature; ``values.i64`` for raw ids
    <split>/<feature>.offsets.i64    [N + 1], of the same
    <split>/kept.<k>.values.u8       bytes of a column that is passed through, ``offsets`` likewise
    <split>/lines.i64                [K, 3], see :mod:`pibroch.data.line_runs`; absent where samples
                                     come from no lines
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pibroch.data.counted import DENSE_ROWS, RowCounts, all_counts
from pibroch.data.line_runs import WIDTH, LineRuns, Places
from pibroch.data.schema import CategoricalFeature, DenseFeature, Schema
from pibroch.data.splits import SPLITS
from pibroch.data.storage import ArrayFile, checksum, write_json
from pibroch.kernels.arrays import Array
from pibroch.storage import storage_errors

_BLOCK_SAMPLES = 1 << 16
FORMAT_VERSION = 1
MANIFEST = "dataset.json"
RAW_IDS = "raw_ids.i64"
WEIGHTS = "sample_weights.f32"
GROUPS = "groups.u64"
EVENT_TIMES = "event_times.i64"
LINES = "lines.i64"
_LATER = {"max_length", "shares", "events", "mean", "std"}


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """R encoded samples.

    Attributes:
        labels: uint8 ``[R]``; float32 ``[R]`` of numbers, ``[R, T]`` where there are several.
        dense: float32 ``[R, n]``, transformed.
        ids: int32 ``[R, F1]``, the features that are not multi-hot and whose ids are rows.
        bags: for each multi-hot feature lengths int64 ``[R]`` and values ``[V]``, int32, or int64
            where they are raw; for each kept column, by :func:`kept_name`, its bytes.
        raw_ids: int64 ``[R, F2]``, as ``ids``, of those whose ids are raw.
        sample_weights: float32 ``[R]``, where the schema has them.
        groups: uint64 ``[R]``, likewise.
        event_times: int64 ``[R]``, milliseconds since 1970, likewise.
        places: int64 ``[R, 2]``, where samples come from lines of sources, likewise.
    """

    labels: Array
    dense: NDArray[np.float32]
    ids: NDArray[np.int32]
    bags: dict[str, tuple[NDArray[np.int64], Array]] = field(default_factory=dict)
    raw_ids: NDArray[np.int64] | None = None
    sample_weights: NDArray[np.float32] | None = None
    groups: NDArray[np.uint64] | None = None
    event_times: NDArray[np.int64] | None = None
    places: Places | None = None

    def chosen(self, mask: NDArray[np.bool_]) -> EncodedRows:
        """The samples where ``mask [R]`` holds."""
        bags = {
            name: (lengths[mask], values[np.repeat(mask, lengths)])
            for name, (lengths, values) in self.bags.items()
        }
        return self._of(mask, bags)

    def between(self, first: int, end: int) -> EncodedRows:
        """Samples ``first`` to ``end``, of which nothing is copied."""
        bags = {}
        for name, (lengths, values) in self.bags.items():
            start = int(lengths[:first].sum())
            stop = start + int(lengths[first:end].sum())
            bags[name] = lengths[first:end], values[start:stop]
        return self._of(slice(first, end), bags)

    def _of(
        self,
        some: NDArray[np.bool_] | slice,
        bags: dict[str, tuple[NDArray[np.int64], Array]],
    ) -> EncodedRows:
        return EncodedRows(
            self.labels[some],
            self.dense[some],
            self.ids[some],
            bags,
            None if self.raw_ids is None else self.raw_ids[some],
            None if self.sample_weights is None else self.sample_weights[some],
            None if self.groups is None else self.groups[some],
            None if self.event_times is None else self.event_times[some],
            None if self.places is None else self.places[some],
        )

    def add_counts(self, schema: Schema, counts: Mapping[str, RowCounts]) -> None:
        """Add to ``counts`` how often each row of some tables is accessed."""
        columns = dict(zip(schema.single_keys(raw=False), self.ids.T, strict=True))
        columns |= {name: values for name, (_, values) in self.bags.items()}
        for table, of_table in counts.items():
            for name in schema.readers[table]:
                of_table.add(columns[name])


@dataclass(frozen=True, slots=True)
class Totals:
    """How far a dataset is written.

    Samples by split, items by split and multi-hot feature or kept column, runs of lines by split.
    """

    samples: dict[str, int]
    items: dict[str, dict[str, int]]
    runs: dict[str, int]

    @classmethod
    def zero(cls, schema: Schema, num_kept: int = 0) -> Totals:
        """Nothing written."""
        names = [feature.name for feature in schema.categorical if feature.multi_hot]
        names += map(kept_name, range(num_kept))
        none = dict.fromkeys(SPLITS, 0)
        return cls(none, {split: dict.fromkeys(names, 0) for split in SPLITS}, {**none})


class DatasetWriter:
    """Appends samples to the splits of a dataset.

    Args:
        folder: where the dataset grows.
        schema: its features.
        totals: what is already there, when an interrupted writing goes on.
        kept: columns that are passed through.
        has_places: whether samples come from lines of sources.
    """

    def __init__(
        self,
        folder: Path,
        schema: Schema,
        totals: Totals | None = None,
        kept: Sequence[str] = (),
        has_places: bool = False,
    ) -> None:
        self.folder = folder
        self.schema = schema
        self.kept = tuple(kept)
        self.totals = totals or Totals.zero(schema, len(kept))
        self._labels = label_file(schema)
        self._widths = {self._labels: len(schema.label_columns), "dense.f32": len(schema.dense)}
        self._widths["ids.i32"] = len(schema.single_keys(raw=False))
        if raw_keys := schema.single_keys(raw=True):
            self._widths[RAW_IDS] = len(raw_keys)
        if schema.weight is not None:
            self._widths[WEIGHTS] = 1
        if schema.group is not None:
            self._widths[GROUPS] = 1
        if schema.time is not None:
            self._widths[EVENT_TIMES] = 1
        self._values = {f.name: values_file(f) for f in schema.categorical if f.multi_hot}
        self._values |= {name: f"{name}.values.u8" for name in map(kept_name, range(len(kept)))}
        self._runs: dict[str, LineRuns] = {}
        self._files: dict[str, ArrayFile] = {}
        for split in SPLITS:
            for name in self._widths:
                self._open(f"{split}/{name}")
            for feature, values in self._values.items():
                self._open(f"{split}/{values}")
                self._open(f"{split}/{feature}.offsets.i64").write_at(0, np.zeros(1, np.int64))
            if has_places:
                file = self._open(f"{split}/{LINES}")
                self._runs[split] = LineRuns(file, self.totals.runs[split])

    def append(self, split: str, rows: EncodedRows) -> None:
        """Write samples behind those of the split.

        Raises:
            StorageError: when the disk refuses.
        """
        first = self.totals.samples[split]
        arrays: dict[str, Array] = {
            self._labels: rows.labels,
            "dense.f32": rows.dense,
            "ids.i32": rows.ids,
        }
        if rows.raw_ids is not None:
            arrays[RAW_IDS] = rows.raw_ids
        if rows.sample_weights is not None:
            arrays[WEIGHTS] = rows.sample_weights
        if rows.groups is not None:
            arrays[GROUPS] = rows.groups
        if rows.event_times is not None:
            arrays[EVENT_TIMES] = rows.event_times
        for name, width in self._widths.items():
            self._files[f"{split}/{name}"].write_at(first * width, arrays[name])
        for feature, (lengths, values) in rows.bags.items():
            start = self.totals.items[split][feature]
            self._files[f"{split}/{self._values[feature]}"].write_at(start, values)
            self._files[f"{split}/{feature}.offsets.i64"].write_at(
                first + 1, start + np.cumsum(lengths)
            )
            self.totals.items[split][feature] = start + len(values)
        if rows.places is not None:
            self._runs[split].append(first, rows.places)
            self.totals.runs[split] = self._runs[split].count
        self.totals.samples[split] = first + len(rows.labels)

    def read(self, split: str, first: int = 0) -> Iterator[EncodedRows]:
        """What was appended to a split but places, from one sample on; in blocks."""
        for start in range(first, self.totals.samples[split], _BLOCK_SAMPLES):
            count = min(_BLOCK_SAMPLES, self.totals.samples[split] - start)
            arrays = {
                name: self._files[f"{split}/{name}"].read_at(start * width, count * width)
                for name, width in self._widths.items()
            }
            raw_ids = arrays.get(RAW_IDS)
            bags = {}
            for feature, values in self._values.items():
                offsets = self._files[f"{split}/{feature}.offsets.i64"].read_at(start, count + 1)
                num_items = int(offsets[-1] - offsets[0])
                items = self._files[f"{split}/{values}"].read_at(int(offsets[0]), num_items)
                bags[feature] = np.diff(offsets), items
            labels = arrays[self._labels]
            num_labels = self._widths[self._labels]
            yield EncodedRows(
                labels.reshape(count, num_labels) if num_labels > 1 else labels,
                arrays["dense.f32"].reshape(count, -1),
                arrays["ids.i32"].reshape(count, -1),
                bags,
                None if raw_ids is None else raw_ids.reshape(count, -1),
                arrays.get(WEIGHTS),
                arrays.get(GROUPS),
                arrays.get(EVENT_TIMES),
            )

    def divide(self, validation: int, test: int) -> None:
        """Move the end of the train split, where all samples are, to the other two.

        Args:
            validation: its first sample.
            test: its first sample.
        """
        place = validation
        for rows in self.read("train", validation):
            is_test = np.arange(place, place + len(rows.labels)) >= test
            for split, mask in (("validation", ~is_test), ("test", is_test)):
                self.append(split, rows.chosen(mask))
            place += len(rows.labels)
        end = self.totals.samples["train"]
        if self._runs:
            self._runs["train"].move(validation, test, self._runs["validation"])
            self._runs["train"].move(test, end, self._runs["test"])
            self._runs["train"].cut(validation)
            self.totals.runs.update({split: runs.count for split, runs in self._runs.items()})
        self.totals.samples["train"] = validation
        for feature, num_items in self.totals.items["train"].items():
            moved = sum(self.totals.items[split][feature] for split in SPLITS[1:])
            self.totals.items["train"][feature] = num_items - moved

    def count_rows(self, num_rows: Mapping[str, int]) -> dict[str, RowCounts]:
        """Accesses of each row in training, of some tables with so many rows."""
        counts = {name: RowCounts(size) for name, size in num_rows.items()}
        for rows in self.read("train") if counts else ():
            rows.add_counts(self.schema, counts)
        return counts

    def write_table(
        self, name: str, counts: RowCounts, codes: NDArray[np.uint64] | None = None
    ) -> None:
        """Write accesses of each row of a table in training and, for a vocabulary, its codes."""
        accessed = counts.accessed()
        if 2 * len(accessed.values) < counts.num_rows and counts.num_rows > DENSE_ROWS:
            write_table(self.folder, name, accessed.counts, codes, accessed.values)
        else:
            write_table(self.folder, name, all_counts(accessed, counts.num_rows), codes)

    def finish(
        self,
        num_rows: Mapping[str, int | None],
        provenance: dict[str, Any],
        truth: dict[str, Any] | None = None,
        has_labels: bool = True,
    ) -> None:
        """Close the arrays and write the manifest with their sizes and checksums.

        Args:
            num_rows: rows of each table, ``None`` where its ids are raw.
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
            "kept": list(self.kept),
            "num_rows": dict(num_rows),
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
        if array == LINES:
            return self.totals.runs[split] * WIDTH
        feature, kind, _ = array.rsplit(".", 2)
        return (
            self.totals.items[split][feature]
            if kind == "values"
            else self.totals.samples[split] + 1
        )


def values_file(feature: CategoricalFeature) -> str:
    """Name of the file with a multi-hot feature's ids."""
    return f"{feature.name}.values.{'i64' if feature.is_raw else 'i32'}"


def kept_name(number: int) -> str:
    """Of a column that is passed through, where features have theirs, which hold no dots."""
    return f"kept.{number}"


def label_file(schema: Schema) -> str:
    """Name of the file with a split's labels."""
    return "labels.u8" if schema.is_binary else "labels.f32"


def write_table(
    folder: Path,
    name: str,
    counts: NDArray[np.int64],
    codes: NDArray[np.uint64] | None = None,
    rows: NDArray[np.int64] | None = None,
) -> None:
    """Write ``tables/<name>.*``, with counts of ``rows`` or, in its absence, of all rows.

    The counts come last and say that the table is whole.
    """
    arrays = [("codes.u64", codes), ("rows.i64", rows), ("counts.i64", counts)]
    for kind, array in arrays:
        if array is not None:
            path = folder / "tables" / f"{name}.{kind}"
            temporary = path.with_name(path.name + ".new")
            with storage_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                array.astype(_dtype_of(path.name)).tofile(temporary)
                temporary.replace(path)


def fingerprint(schema: Schema, num_rows: Mapping[str, int | None], folder: Path) -> str:
    """A hash over what a checkpoint depends on: features, encodings, table sizes, vocabularies."""
    content: dict[str, object] = {
        "dense": [_about(feature) for feature in schema.dense],
        "categorical": [_about(feature) for feature in schema.categorical],
        "num_rows": dict(num_rows),
    }
    if schema.nulls:
        content["nulls"] = schema.nulls
    of_texts = any(feature.encoding in ("hash", "raw") for feature in schema.categorical)
    if schema.text_rules > 1 and of_texts:
        # a vocabulary shows by itself what its values are
        content["text_rules"] = schema.text_rules
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for table in schema.readers:
        path = folder / "tables" / f"{table}.codes.u64"
        if path.exists():
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:32]


def _about(feature: CategoricalFeature | DenseFeature) -> dict[str, object]:
    """All that is said of a feature; what schemas could not say at first, only where it is said."""
    said = feature.model_dump()
    usual = {key: type(feature).model_fields[key].default for key in _LATER & said.keys()}
    return {key: value for key, value in said.items() if key not in usual or value != usual[key]}


def _dtype_of(name: str) -> str:
    kind = name.rsplit(".", 1)[1]
    return {"u8": "<u1", "u64": "<u8", "i32": "<i4", "i64": "<i8", "f32": "<f4"}[kind]
