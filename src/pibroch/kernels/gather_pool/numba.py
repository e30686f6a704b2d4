"""What runs on the CPU; legend in :mod:`pibroch.kernels.gather_pool`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.arrays import Stored
from pibroch.kernels.memory import FLOATS_PER_LINE, MAX_SHORT_DIM, prefetch_row, stream_line
from pibroch.kernels.policy import kernel
from pibroch.kernels.row_sum import sum_rows

# Rows between the one that is read and the one that is fetched, fewer where each has an output
# beside it. Of 128 bytes a row of bags of 5 took 5.7 ns with 24 between, 2.7 with 128.
AHEAD_OF_ONE = 64
LEAST_AHEAD = 48
MOST_AHEAD = 128
BYTES_AHEAD = 32768


@kernel
def resolve_rows(
    values: NDArray[np.int64],
    offsets: NDArray[np.int64],
    first_row: NDArray[np.int64],
    num_rows: NDArray[np.int64],
    row_ids: NDArray[np.int64],
    start: int,
    stop: int,
) -> int:
    """Write the row id of each value of the bags ``start`` to ``stop`` to ``row_ids``.

    Returns:
        The position of the first id out of range, or -1.
    """
    num_features = len(first_row)
    num_samples = (len(offsets) - 1) // num_features
    for feature in range(num_features):
        first = first_row[feature]
        limit = num_rows[feature]
        begin = offsets[min(max(start, feature * num_samples), stop)]
        end = offsets[min(max(start, (feature + 1) * num_samples), stop)]
        num_bad = 0
        for position in range(begin, end):
            value = values[position]
            num_bad += (value < 0) | (value >= limit)
            row_ids[position] = value + first
        if num_bad:
            for position in range(begin, end):
                if values[position] < 0 or values[position] >= limit:
                    return position
    return -1


@kernel
def first_absent(
    values: NDArray[np.int64],
    offsets: NDArray[np.int64],
    num_rows: NDArray[np.int64],
    start: int,
    stop: int,
) -> int:
    """The position of the first id out of range of the bags ``start`` to ``stop``, or -1."""
    num_features = len(num_rows)
    num_samples = (len(offsets) - 1) // num_features
    for feature in range(num_features):
        limit = np.uint64(num_rows[feature])
        begin = offsets[min(max(start, feature * num_samples), stop)]
        end = offsets[min(max(start, (feature + 1) * num_samples), stop)]
        num_bad = np.int64(0)
        for position in range(begin, end):
            num_bad += np.uint64(values[position]) >= limit
        if num_bad:
            for position in range(begin, end):
                if np.uint64(values[position]) >= limit:
                    return position
    return -1


@kernel
def gather_pool(
    records: Stored,
    row_ids: NDArray[np.int64],
    first_rows: NDArray[np.int64],
    offsets: NDArray[np.int64],
    scale: NDArray[np.float32],
    first_columns: NDArray[np.int64],
    dim: int,
    pooled_BS: NDArray[np.float32],
    stream: bool,
    start: int,
    stop: int,
) -> None:
    """Pool the bags ``start`` to ``stop`` into D columns of ``pooled_BS`` a feature.

    An empty ``scale`` means ones, empty ``first_rows`` zeros. With ``stream`` (needs
    ``memory.can_stream(pooled_BS)``, and features that begin and end with a cache line) bags of one
    id are copied past the caches, which hold little of an output of this size by the time it is
    read (measured: 2.2 ms instead of 2.9 at D = 64).
    """
    num_samples, num_columns = pooled_BS.shape
    last = len(row_ids) - 1
    width = records.shape[1]
    floats = (dim * records.itemsize + 3) // 4
    copies = stream and len(scale) == 0
    far = min(max(BYTES_AHEAD // (4 * floats), LEAST_AHEAD), MOST_AHEAD)
    near = min(far, AHEAD_OF_ONE)
    bag = start
    while bag < stop:  # a feature at a time
        feature = bag // num_samples
        first_bag = feature * num_samples
        first_column = first_columns[feature]
        first_row = first_rows[feature] if len(first_rows) > 0 else 0
        feature_stop = min(stop, first_bag + num_samples)
        end = offsets[bag]
        for sample in range(bag - first_bag, feature_stop - first_bag):
            begin = end
            end = offsets[np.uint64(first_bag + sample + 1)]
            place = sample * num_columns + first_column
            if begin == end:
                for d in range(dim):
                    pooled_BS[np.uint64(sample), np.uint64(first_column + d)] = 0.0
            elif copies and end == begin + 1:
                ahead = first_row + row_ids[np.uint64(min(begin + near, last))]
                prefetch_row(records, ahead, floats, floats > MAX_SHORT_DIM)
                row = first_row + row_ids[np.uint64(begin)]
                for d in range(0, dim, FLOATS_PER_LINE):
                    stream_line(records, row * width + d, pooled_BS, place + d)
            else:
                sum_rows(
                    records,
                    row_ids,
                    None,
                    scale,
                    first_row,
                    begin,
                    end,
                    dim,
                    near if end == begin + 1 else far,
                    pooled_BS,
                    place,
                )
        bag = feature_stop


@kernel
def gradient_sources(
    offsets: NDArray[np.int64],
    first_rows: NDArray[np.int64],
    rows_per_sample: int,
    source: NDArray[np.int32],
) -> None:
    """For each position the row of the gradients with which its own begins.

    A feature's begin with row ``first_rows[f]`` of each sample's.
    """
    num_samples = (len(offsets) - 1) // len(first_rows)
    for feature in range(len(first_rows)):
        for sample in range(num_samples):
            bag = feature * num_samples + sample
            for position in range(offsets[bag], offsets[bag + 1]):
                source[position] = sample * rows_per_sample + first_rows[feature]


@kernel
def pooling_scale(
    offsets: NDArray[np.int64],
    weights: NDArray[np.float32],
    mean_of_feature: NDArray[np.bool_],
    scale: NDArray[np.float32],
) -> None:
    """Factor of each position: its weight, over the bag's length where bags are averaged."""
    num_samples = (len(offsets) - 1) // len(mean_of_feature)
    weighted = len(weights) > 0
    for bag in range(len(offsets) - 1):
        begin = offsets[bag]
        end = offsets[bag + 1]
        factor = np.float32(1.0)
        if mean_of_feature[bag // num_samples] and end > begin:
            factor = np.float32(1.0) / np.float32(end - begin)
        for position in range(begin, end):
            scale[position] = factor * weights[position] if weighted else factor
