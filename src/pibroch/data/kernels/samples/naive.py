"""What gathering samples means, in plain NumPy."""

from __future__ import annotations

import numpy as np

from pibroch.kernels.arrays import Array


def gather_samples(samples: Array, labels: Array, dense: Array) -> tuple[Array, Array]:
    """Labels ``[B, T]`` and dense values ``[B, n]`` of the samples."""
    return labels[samples].astype(np.float32), dense[samples]


def gather_ids(samples: Array, ids: Array) -> Array:
    """Ids ``[F1, B]`` of the samples."""
    return ids[samples].T.astype(np.int64)


def gather_bags(samples: Array, values: Array, offsets: Array) -> Array:
    """The samples' bags, one after the other, int64 ``[V]``."""
    bags = [values[offsets[sample] : offsets[sample + 1]] for sample in samples]
    return np.concatenate([np.empty(0, np.int64), *bags]).astype(np.int64)


def first_fall(offsets: Array) -> int:
    """The first place whose successor is smaller, or -1."""
    return next((i for i in range(len(offsets) - 1) if offsets[i + 1] < offsets[i]), -1)


def first_not_finite(numbers: Array) -> int:
    """The place of the first infinity or NaN, or -1."""
    return next((i for i, number in enumerate(numbers) if not np.isfinite(number)), -1)
