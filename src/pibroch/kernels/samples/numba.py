"""Samples of an encoded split into minibatches, and a check of their offsets.

B samples, F1 features of one id each, n dense features, V ids of the others.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.policy import kernel

TILE = 16


@kernel
def gather_samples(
    samples: NDArray[np.int64],
    labels: NDArray[np.uint8],
    dense: NDArray[np.float32],
    ids: NDArray[np.int32],
    labels_out: NDArray[np.float32],
    dense_out: NDArray[np.float32],
    ids_out_FB: NDArray[np.int64],
) -> None:
    """Records of the samples, feature-major.

    They are transposed in tiles of samples, so that whole cache lines are written.
    """
    num_samples = len(samples)
    num_dense = dense.shape[1]
    num_ids = ids.shape[1]
    for first in range(0, num_samples, TILE):
        after = min(first + TILE, num_samples)
        for i in range(first, after):
            labels_out[i] = labels[samples[i]]
            for column in range(num_dense):
                dense_out[i, column] = dense[samples[i], column]
        for column in range(num_ids):
            for i in range(first, after):
                ids_out_FB[column, i] = ids[samples[i], column]


@kernel
def gather_bags(
    samples: NDArray[np.int64],
    values: NDArray[np.int32],
    offsets: NDArray[np.int64],
    out: NDArray[np.int64],
) -> None:
    """The samples' bags of one feature, one after the other, in ``out`` ``[V]``."""
    place = 0
    for sample in samples:
        for item in range(offsets[sample], offsets[sample + 1]):
            out[place] = values[item]
            place += 1


@kernel
def first_fall(offsets: NDArray[np.int64]) -> int:
    """The first place whose successor is smaller, or -1.

    It compares, since a difference of extreme offsets wraps.

    >>> first_fall(np.array([0, 2, 2, 1, 5]))
    2
    """
    falls = 0
    for place in range(len(offsets) - 1):
        falls += offsets[place + 1] < offsets[place]
    if falls:
        for place in range(len(offsets) - 1):
            if offsets[place + 1] < offsets[place]:
                return place
    return -1
