"""Samples of an encoded split into minibatches, and a check of their offsets.

B samples, T labels, F features of one id each, F1 of them in one array, n dense features, V ids of
others.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.policy import kernel

TILE = 16


@kernel
def gather_samples(
    samples: NDArray[np.int64],
    labels: NDArray[np.uint8] | NDArray[np.float32],
    dense: NDArray[np.float32],
    labels_out: NDArray[np.float32],
    dense_out: NDArray[np.float32],
) -> None:
    """Labels ``[B, T]`` and dense values ``[B, n]`` of the samples."""
    num_labels = labels.shape[1]
    num_dense = dense.shape[1]
    for i in range(len(samples)):
        for column in range(num_labels):
            labels_out[i, column] = labels[samples[i], column]
        for column in range(num_dense):
            dense_out[i, column] = dense[samples[i], column]


@kernel
def gather_ids(
    samples: NDArray[np.int64],
    ids: NDArray[np.int32] | NDArray[np.int64],
    features: NDArray[np.int64],
    out_FB: NDArray[np.int64],
) -> None:
    """Ids ``[N, F1]`` of the samples, feature-major, to the rows ``features [F1]`` of ``out_FB``.

    They are transposed in tiles of samples, so that whole cache lines are written.
    """
    num_samples = len(samples)
    for first in range(0, num_samples, TILE):
        after = min(first + TILE, num_samples)
        for column in range(len(features)):
            for i in range(first, after):
                out_FB[features[column], i] = ids[samples[i], column]


@kernel
def gather_bags(
    samples: NDArray[np.int64],
    values: NDArray[np.int32] | NDArray[np.int64],
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


@kernel
def first_not_finite(numbers: NDArray[np.float32]) -> int:
    """The place of the first infinity or NaN, or -1.

    It looks at exponents, whatever sums do.

    >>> first_not_finite(np.array([0, 1e38, np.nan, np.inf], np.float32))
    2
    """
    exponent = np.int32(0x7F800000)
    bits = numbers.view(np.int32)
    count = 0
    for place in range(len(bits)):
        count += (bits[place] & exponent) == exponent
    if count:
        for place in range(len(bits)):
            if (bits[place] & exponent) == exponent:
                return place
    return -1
