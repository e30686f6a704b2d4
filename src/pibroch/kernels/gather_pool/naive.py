"""What gather-pool means, in plain NumPy. Arguments as in :mod:`pibroch.kernels.gather_pool`."""

from __future__ import annotations

import numpy as np

from pibroch.kernels.arrays import Array, Ints, Records, RowIds, Stored
from pibroch.kernels.narrow.naive import widened


def resolve_rows(values: Ints, offsets: Ints, first_row: Ints, num_rows: Ints, out: Ints) -> int:
    """Ids local to each feature's table → row ids of the row space."""
    num_samples = (len(offsets) - 1) // len(first_row)
    for feature in range(len(first_row)):
        span = slice(offsets[feature * num_samples], offsets[(feature + 1) * num_samples])
        bad = np.flatnonzero((values[span] < 0) | (values[span] >= num_rows[feature]))
        if len(bad):
            return int(span.start + bad[0])
        out[span] = values[span] + first_row[feature]
    return -1


def first_absent(values: Ints, offsets: Ints, num_rows: Ints) -> int:
    """The position of the first id out of range, or -1."""
    limits = np.repeat(num_rows, (len(offsets) - 1) // len(num_rows))
    (bad,) = np.nonzero((values < 0) | (values >= np.repeat(limits, np.diff(offsets))))
    return int(bad[0]) if len(bad) else -1


def gather_pool(
    records: Stored,
    rows: RowIds,
    first_rows: Ints,
    offsets: Ints,
    scale: Records,
    first_columns: Ints,
    dim: int,
    unit: int,
    out: Records,
) -> None:
    """Sum of ``scale * weights`` over each bag, in its feature's columns of ``out``."""
    num_samples = len(out)
    weights = widened(records[:, :dim])
    for bag in range(len(first_columns) * num_samples):
        feature, sample = divmod(bag, num_samples)
        pooled = out[sample, first_columns[feature] : first_columns[feature] + dim]
        pooled[:] = 0
        first_row = first_rows[feature] if len(first_rows) else 0
        for position in range(offsets[bag], offsets[bag + 1]):
            factor = scale[position] if len(scale) else np.float32(1)
            pooled += factor * weights[first_row + rows[position]]


def gradient_sources(offsets: Ints, first_rows: Ints, rows_per_sample: int, out: Array) -> None:
    """For each position the row of the gradients with which its own begins."""
    num_samples = (len(offsets) - 1) // len(first_rows)
    bags = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    out[:] = (bags % num_samples) * rows_per_sample + first_rows[bags // num_samples]


def pooling_scale(offsets: Ints, weights: Records, mean_of_feature: Array, out: Records) -> None:
    """A position's weight, over the bag's length where the feature's bags are averaged."""
    lengths = np.diff(offsets)
    num_samples = len(lengths) // len(mean_of_feature)
    divisors = np.where(np.repeat(mean_of_feature, num_samples), np.maximum(lengths, 1), 1)
    factors = np.repeat(1.0 / divisors, lengths)
    out[:] = factors * weights if len(weights) else factors
