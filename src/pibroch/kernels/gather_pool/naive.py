"""What gather-pool means, in plain NumPy. Shapes as in :mod:`pibroch.kernels.gather_pool.numba`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


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
    records: NDArray[np.float32],
    row_ids: NDArray[np.int64],
    offsets: NDArray[np.int64],
    scale: NDArray[np.float32],
    num_features: int,
    dim: int,
) -> NDArray[np.float32]:
    """Sum of ``scale * weights`` over each bag, ``[B, F, D]``; an empty ``scale`` means ones."""
    num_samples = (len(offsets) - 1) // num_features
    pooled_BFD = np.zeros((num_samples, num_features, dim), np.float32)
    for bag in range(num_features * num_samples):
        feature, sample = divmod(bag, num_samples)
        for position in range(offsets[bag], offsets[bag + 1]):
            factor = scale[position] if len(scale) else np.float32(1)
            pooled_BFD[sample, feature] += factor * records[row_ids[position], :dim]
    return pooled_BFD
