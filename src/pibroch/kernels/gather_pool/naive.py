"""What gather-pool means, in plain NumPy. Shapes as in :mod:`pibroch.kernels.gather_pool.numba`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.arrays import Stored
from pibroch.kernels.narrow.naive import widened


def resolve_rows(
    values: NDArray[np.int64], offsets: NDArray[np.int64], first_row: NDArray[np.int64], num_rows: NDArray[np.int64]
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
    num_features: int,
    dim: int,
) -> NDArray[np.float32]:
    """Sum of ``scale * weights`` over each bag, ``[B, F, D]``; an empty ``scale`` means ones."""
    num_samples = (len(offsets) - 1) // num_features
    weights = widened(records[:, :dim])
    pooled_BFD = np.zeros((num_samples, num_features, dim), np.float32)
    for bag in range(num_features * num_samples):
        feature, sample = divmod(bag, num_samples)
        for position in range(offsets[bag], offsets[bag + 1]):
            factor = scale[position] if len(scale) else np.float32(1)
            pooled_BFD[sample, feature] += factor * weights[row_ids[position]]
    return pooled_BFD


def gradient_sources(offsets: NDArray[np.int64], num_features: int) -> NDArray[np.int32]:
    """For each position the row of the gradient ``[B * F, D]`` that belongs to it."""
    num_samples = (len(offsets) - 1) // num_features
    bags = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    return ((bags % num_samples) * num_features + bags // num_samples).astype(np.int32)


def pooling_scale(
    offsets: NDArray[np.int64], weights: NDArray[np.float32], mean_of_feature: NDArray[np.bool_]
) -> NDArray[np.float32]:
    """Factor of each position: its weight (ones when empty), over the bag's length where the feature's bags are averaged."""
    lengths = np.diff(offsets)
    num_samples = len(lengths) // len(mean_of_feature)
    divisors = np.where(np.repeat(mean_of_feature, num_samples), np.maximum(lengths, 1), 1)
    factors = np.repeat(1.0 / divisors, lengths)
    return (factors * weights if len(weights) else factors).astype(np.float32)
