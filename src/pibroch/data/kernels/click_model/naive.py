"""What the parts of a factorisation machine's logits mean: every pair of categories by itself."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from pibroch.kernels.arrays import Array


def sums(
    standard: Array,
    ids: Array,
    starts: Array,
    first_row: Array,
    effects: Array,
    bag_scale: Array,
    dense_effects: Array,
) -> tuple[Array, Array]:
    """The linear part and the sum over pairs of categories, ``[R]`` each."""
    linear = standard.astype(np.float64) @ dense_effects
    pairs = np.zeros(len(standard))
    num_features = len(first_row)
    for sample in range(len(standard)):
        fields = []
        for feature in range(num_features):
            bag = sample * num_features + feature
            rows = first_row[feature] + ids[starts[bag] : starts[bag + 1]]
            fields.append(effects[rows].astype(np.float64).sum(0) * bag_scale[feature])
        linear[sample] += sum(field[0] for field in fields)
        pairs[sample] = sum(one[1:] @ other[1:] for one, other in combinations(fields, 2))
    return linear, pairs
