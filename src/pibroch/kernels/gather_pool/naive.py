"""What gather-pool means, in plain NumPy. Shapes as in :mod:`pibroch.kernels.gather_pool.numba`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.arrays import Stored
from pibroch.kernels.narrow.naive import widened


def resolve_rows(
    values: NDArray[np.int64],
    offsets: NDArray[np.int64],
    first_row: NDArray[np.int64],
    num_rows: NDArray[np.int64],
) -> tuple[NDArray[np.int64], int]:
    """Ids local to each feature's table → row ids of the row space, and the position of the first bad id or -1."""
    num_features = len(first_row)
    bags_per_feature = (len(offsets) - 1) // num_features
    row_ids = np.empty(len(values), np.int64)
    for feature in range(num_features):
        span = slice(offsets[feature * bags_per_feature], offsets[(feature + 1) * bags_per_feature])
        bad = np.flatnonzero((values[span] < 0) | (values[span] >= num_rows[feature]))
        if len(bad):
            return row_ids, int(span.start + bad[0])
        row_ids[span] = values[span] + first_row[feature]
    return row_ids, -1


def gather_pool(
    records: Stored,
    row_ids: NDArray[np.int64],
    offsets: NDArray[np.int64],
    scale: NDArray[np.float32],
    first_columns: NDArray[np.int64],
    dim: int,
    pooled_BS: NDArray[np.float32],
) -> None:
    """Sum of ``scale * weights`` over each bag, in its feature's columns of ``pooled_BS``.

    An empty ``scale`` means ones.
    """
    num_samples = len(pooled_BS)
    weights = widened(records[:, :dim])
    for bag in range(len(first_columns) * num_samples):
        feature, sample = divmod(bag, num_samples)
        pooled = pooled_BS[sample, first_columns[feature] : first_columns[feature] + dim]
        pooled[:] = 0
        for position in range(offsets[bag], offsets[bag + 1]):
            factor = scale[position] if len(scale) else np.float32(1)
            pooled += factor * weights[row_ids[position]]


def gradient_sources(
    offsets: NDArray[np.int64], first_rows: NDArray[np.int64], rows_per_sample: int
) -> NDArray[np.int32]:
    """For each position the row of the gradients ``[B * rows_per_sample, unit]`` with which its own begins."""
    num_samples = (len(offsets) - 1) // len(first_rows)
    bags = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    return ((bags % num_samples) * rows_per_sample + first_rows[bags // num_samples]).astype(
        np.int32
    )


def pooling_scale(
    offsets: NDArray[np.int64], weights: NDArray[np.float32], mean_of_feature: NDArray[np.bool_]
) -> NDArray[np.float32]:
    """Factor of each position: its weight (ones when empty), over the bag's length where the feature's bags are averaged."""
    lengths = np.diff(offsets)
    num_samples = len(lengths) // len(mean_of_feature)
    divisors = np.where(np.repeat(mean_of_feature, num_samples), np.maximum(lengths, 1), 1)
    factors = np.repeat(1.0 / divisors, lengths)
    return (factors * weights if len(weights) else factors).astype(np.float32)
