"""Raw values to a batch, for serving: by the same transform and encoders as preparation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from pibroch.data.batch import JaggedBatch
from pibroch.data.encode import FeatureEncoder, raw_numbers
from pibroch.data.schema import Schema
from pibroch.data.transform import transform_dense
from pibroch.errors import DataError


def batch_from_raw(
    schema: Schema, encoders: Mapping[str, FeatureEncoder], columns: Mapping[str, Sequence[object]]
) -> JaggedBatch:
    """Encode B samples given as raw columns.

    Args:
        schema: of the dataset that the model was trained on.
        encoders: its ``EncodedDataset.encoders``.
        columns: raw values by column, each of length B; ``None`` or the empty string is missing. The label's column may be
            absent (labels are then 0).

    Raises:
        DataError: a column absent or of another length, or no finite number where one is needed.
    """
    lengths = {len(values) for values in columns.values()}
    needed = [column for column in schema.used_columns() if column != schema.label]
    if missing := [column for column in needed if column not in columns]:
        raise DataError(f"no column `{missing[0]}`", f"the columns {', '.join(needed)[:160]}", "send None for missing")
    if len(lengths) != 1:
        raise DataError(
            f"columns of {sorted(lengths)} values", "one value per sample in each column", "fill up with None"
        )
    size = lengths.pop()
    dense = np.empty((size, len(schema.dense)), np.float32)
    for i, feature in enumerate(schema.dense):
        dense[:, i] = transform_dense(raw_numbers(feature.column, columns[feature.column]), feature.transform)
    values, bag_lengths = [], []
    for categorical in schema.categorical:
        rows, per_value = encoders[categorical.name].encode(columns[categorical.column])
        values.append(rows.astype(np.int64))
        bag_lengths.append(np.ones(size, np.int64) if per_value is None else per_value)
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(bag_lengths))])
    labels = raw_numbers(schema.label, columns[schema.label]) if schema.label in columns else np.zeros(size)
    return JaggedBatch(
        torch.from_numpy(dense),
        schema.keys,
        torch.from_numpy(np.concatenate(values)),
        torch.from_numpy(offsets),
        torch.from_numpy(labels.astype(np.float32)),
    )
