"""The linear and the pair part of a factorisation machine's logits.

R samples, n dense features, F categories, V ids sample by sample, K factors.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.policy import kernel


@kernel
def sums(
    standard: NDArray[np.float32],
    ids: NDArray[np.int32],
    starts: NDArray[np.int64],
    first_row: NDArray[np.int64],
    effects: NDArray[np.float32],
    bag_scale: NDArray[np.float32],
    dense_effects: NDArray[np.float32],
    linear_out: NDArray[np.float64],
    pairs_out: NDArray[np.float64],
) -> None:
    """Sum over pairs by half of (square of the sum minus sum of the squares)."""
    num_features = len(first_row)
    width = effects.shape[1]
    field = np.empty(width)
    total = np.empty(width)
    squares = np.empty(width)
    for sample in range(len(standard)):
        total[:] = 0.0
        squares[:] = 0.0
        for column in range(standard.shape[1]):
            total[0] += standard[sample, column] * dense_effects[column]
        for feature in range(num_features):
            bag = sample * num_features + feature
            field[:] = 0.0
            for item in range(starts[bag], starts[bag + 1]):
                row = first_row[feature] + ids[item]
                for k in range(width):
                    field[k] += effects[row, k]
            for k in range(width):
                value = field[k] * bag_scale[feature]
                total[k] += value
                squares[k] += value * value
        pairs = 0.0
        for k in range(1, width):
            pairs += total[k] * total[k] - squares[k]
        linear_out[sample] = total[0]
        pairs_out[sample] = 0.5 * pairs
