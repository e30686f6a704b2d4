"""Raw values to a batch, for serving: by the same transform and encoders as preparation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from pibroch.data.batch import JaggedBatch, one_hot_offsets
from pibroch.data.encode import Encoders, FeatureEncoder, raw_numbers, texts_of
from pibroch.data.kernels.text import hash_fields, parse_numbers
from pibroch.data.parse import Fields, without_nulls
from pibroch.data.schema import CategoricalFeature, Schema
from pibroch.data.transform import bin_rows, standardised, transform_dense
from pibroch.errors import DataError


def batch_from_raw(
    schema: Schema, encoders: Mapping[str, FeatureEncoder], columns: Mapping[str, Sequence[object]]
) -> JaggedBatch:
    """Encode B samples given as raw columns.

    Args:
        schema: of the dataset that the model was trained on.
        encoders: its ``EncodedDataset.encoders``.
        columns: raw values by column, each of length B; ``None``, NaN or the empty string is
            missing. Labels are read where there is one column of 0 and 1, and 0 otherwise.

    Raises:
        DataError: a column absent or of another length, a value that is no single one, or no finite
            number where one is needed.
    """
    lengths = {len(values) for values in columns.values()}
    needed = schema.used_columns(with_label=False)
    if missing := [column for column in needed if column not in columns]:
        raise DataError(
            f"no column `{missing[0]}`",
            f"the columns {', '.join(needed)[:160]}",
            "send None for missing",
        )
    if len(lengths) != 1:
        raise DataError(
            f"columns of {sorted(lengths)} values",
            "one value per sample in each column",
            "fill up with None",
        )
    size = lengths.pop()
    numeric = [f.column for f in schema.dense] + [f.column for f in _binned(schema)]
    hashed = [feature.column for feature in schema.categorical if _is_hashed(feature)]
    has_label = schema.has_plain_label and schema.label in columns
    label = schema.label_columns if has_label else ()
    wanted = tuple(dict.fromkeys([*label, *numeric, *hashed]))
    fields = RawFields(columns, wanted, size, schema.text_rules, schema.null_texts)
    numbers = fields.numbers(numeric)
    dense = np.empty((size, len(schema.dense)), np.float32)
    for transform in {feature.transform for feature in schema.dense}:
        places = [
            place for place, feature in enumerate(schema.dense) if feature.transform == transform
        ]
        given = np.stack([numbers[schema.dense[place].column] for place in places])
        dense[:, places] = transform_dense(given, transform).T
    for place, feature in enumerate(schema.dense):
        if feature.is_standardised:
            dense[:, place] = standardised(dense[:, place], feature.mean, feature.std)
    values, bag_lengths = _rows(schema, encoders, columns, fields, numbers)
    ids = np.concatenate(values)
    labels = np.zeros((size, len(schema.label_columns)) if len(schema.label_columns) > 1 else size)
    for column in label:
        labels = fields.numbers(label)[column]
    offsets = one_hot_offsets(len(ids)) if bag_lengths is None else _offsets(bag_lengths)
    return JaggedBatch(
        torch.from_numpy(dense),
        schema.keys,
        torch.from_numpy(ids),
        offsets,
        torch.from_numpy(labels.astype(np.float32)),
    )


def _rows(
    schema: Schema,
    encoders: Mapping[str, FeatureEncoder],
    columns: Mapping[str, Sequence[object]],
    fields: RawFields,
    numbers: Mapping[str, NDArray[np.float64]],
) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int64]] | None]:
    """Rows of each feature in the schema's order, and ids a sample where some feature is multi-hot.

    Works on all features at once where it can: a request of one sample has forty columns of one
    value.
    """
    features = schema.categorical
    binned = _binned(schema)
    hashed = [feature for feature in features if _is_hashed(feature)]
    rows: dict[str, NDArray[np.int64]] = {}
    for binning in {feature.binning for feature in binned if feature.binning is not None}:
        alike = [feature for feature in binned if feature.binning == binning]
        bins = bin_rows(np.stack([numbers[feature.column] for feature in alike]), binning)
        rows |= {feature.name: some for feature, some in zip(alike, bins, strict=True)}
    if hashed:
        stacked = encoders.stacked if isinstance(encoders, Encoders) else ()
        hashed.sort(key=lambda feature: feature.name not in stacked)
        codes = fields.codes([feature.column for feature in hashed])
        names = [feature.name for feature in hashed if feature.name in stacked]
        if names and not isinstance(stacked, tuple):
            rows |= dict(zip(names, stacked.rows(names, codes[: len(names)]), strict=True))
        for place, feature in enumerate(hashed[len(names) :], len(names)):
            rows[feature.name] = encoders[feature.name].ids(codes[place]).astype(np.int64)
    counts: dict[str, NDArray[np.int64]] = {}
    for feature in features:
        if feature.name not in rows:
            of_feature, per_value = encoders[feature.name].encode(columns[feature.column])
            rows[feature.name] = of_feature.astype(np.int64)
            if per_value is not None:
                counts[feature.name] = per_value
    in_order = [rows[feature.name] for feature in features]
    if not counts:
        return in_order, None
    ones = np.ones(fields.num_samples, np.int64)
    return in_order, [counts.get(feature.name, ones) for feature in features]


def _binned(schema: Schema) -> list[CategoricalFeature]:
    return [feature for feature in schema.categorical if feature.binning is not None]


def _is_hashed(feature: CategoricalFeature) -> bool:
    """Whether the code of a value is the hash of all its bytes."""
    special = feature.multi_hot or feature.binning is not None or feature.characters is not None
    return not special and feature.encoding != "integer"


def _offsets(lengths: list[NDArray[np.int64]]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(np.concatenate(lengths))]))


class RawFields:
    """The texts of many columns, one behind the other, which one call of a kernel reads.

    Args:
        columns: raw values.
        wanted: columns of single values.
        num_samples: B.
        text_rules: the schema's.
        nulls: the schema's texts of missing values.

    Raises:
        DataError: for a value that has no text.
    """

    def __init__(
        self,
        columns: Mapping[str, Sequence[object]],
        wanted: Sequence[str],
        num_samples: int,
        text_rules: int,
        nulls: tuple[bytes, ...] = (),
    ) -> None:
        self._columns = columns
        self._nulls = nulls
        self.num_samples = num_samples
        self._text_rules = text_rules
        self._place = {column: place for place, column in enumerate(wanted)}
        text, lengths = self._plain(wanted) or self._mixed(wanted)
        bounds = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=bounds[1:])
        shape = len(wanted), num_samples
        self._starts = bounds[:-1].reshape(shape)
        self._ends = bounds[1:].reshape(shape)
        self._text = np.frombuffer(text or b" ", np.uint8)

    def _plain(self, wanted: Sequence[str]) -> tuple[bytes, list[int]] | None:
        """All texts joined, and their lengths, if all values are ASCII, bytes or missing."""
        values = [
            "" if value is None else value for column in wanted for value in self._columns[column]
        ]
        try:
            whole = "".join(values)  # type: ignore[arg-type]  # TypeError otherwise
        except TypeError:
            if set(map(type, values)) != {bytes}:
                return None
            return b"".join(values), list(map(len, values))  # type: ignore[arg-type]
        if not whole.isascii():
            return None
        return whole.encode(), list(map(len, values))  # type: ignore[arg-type]

    def _mixed(self, wanted: Sequence[str]) -> tuple[bytes, list[int]]:
        """The same of values of any kind."""
        texts: list[bytes] = []
        for column in wanted:
            texts += texts_of(column, self._columns[column], self._text_rules)
        return b"".join(texts), list(map(len, texts))

    def numbers(self, columns: Sequence[str]) -> dict[str, NDArray[np.float64]]:
        """Numbers of some columns, each float64 ``[B]``; NaN where the value is missing.

        Raises:
            DataError: when a value is no finite number; names the column, the sample and the value.
        """
        columns = list(dict.fromkeys(columns))
        if not columns:
            return {}
        numbers, good = parse_numbers(*self._of(columns))
        if not good.all():
            wrong = columns[int(np.flatnonzero(~good)[0]) // self.num_samples]
            # which says what is wrong
            raw_numbers(wrong, self._columns[wrong], self._text_rules, self._nulls)
        return dict(zip(columns, numbers.reshape(len(columns), self.num_samples), strict=True))

    def codes(self, columns: Sequence[str]) -> NDArray[np.uint64]:
        """Codes of the values of some columns, uint64 ``[columns, B]``."""
        return hash_fields(*self._of(columns)).reshape(len(columns), self.num_samples)

    def _of(self, columns: Sequence[str]) -> Fields:
        places = [self._place[column] for column in columns]
        fields = self._text, self._starts[places].reshape(-1), self._ends[places].reshape(-1)
        return without_nulls(fields, self._nulls)
