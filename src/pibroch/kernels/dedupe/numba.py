"""Group equal row ids: a stable radix sort, so that each row's positions keep the order in which they were given.

V ids, U distinct rows. Cost O(V) for each 11 bits of the span of the ids.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.policy import kernel

RADIX_BITS = 11  # 2,048 counters stay in the first-level cache
RADIX = 1 << RADIX_BITS


@kernel
def sample_major_sequence(offsets: NDArray[np.int64], num_features: int, sequence: NDArray[np.int32]) -> None:
    """Positions of feature-major bags in the order sample, feature, place in the bag.

    Needed where several features read one table: gradients are summed in sample order (design, section 2).
    """
    num_samples = (len(offsets) - 1) // num_features
    filled = 0
    for sample in range(num_samples):
        for feature in range(num_features):
            bag = feature * num_samples + sample
            for position in range(offsets[bag], offsets[bag + 1]):
                sequence[filled] = position
                filled += 1


@kernel
def dedupe(
    row_ids: NDArray[np.int64],
    sequence: NDArray[np.int32],
    rows: NDArray[np.int64],
    segments: NDArray[np.int32],
    order: NDArray[np.int32],
    start: int,
    stop: int,
) -> int:
    """Group the positions of equal ids among ``sequence[start:stop]``; threads may take ranges that share no id.

    Args:
        row_ids: ``[V]``.
        sequence: ``[V]``, the positions in the order in which they are to be kept.
        rows: ``[V]``, receives the U distinct ids of the range, rising, from ``start`` on.
        segments: ``[V]``, receives where each one's positions begin, from ``start`` on: row u has those in ``order`` from
            ``segments[start + u]`` to the next row's.
        order: ``[V]``, receives the positions grouped by row.
        start: of the range.
        stop: of the range.

    Returns:
        U, the number of distinct ids in the range.
    """
    num_ids = stop - start
    if num_ids == 0:
        return 0
    lowest = highest = row_ids[sequence[start]]
    for i in range(start, stop):
        lowest, highest = min(lowest, row_ids[sequence[i]]), max(highest, row_ids[sequence[i]])
    source_keys, target_keys = np.empty(num_ids, np.int64), np.empty(num_ids, np.int64)
    source, target = np.empty(num_ids, np.int32), np.empty(num_ids, np.int32)
    for i in range(num_ids):
        source[i] = sequence[start + i]
        source_keys[i] = row_ids[sequence[start + i]] - lowest
    shift, span = 0, highest - lowest
    starts = np.empty(RADIX + 1, np.int64)
    while span >> shift:
        starts[:] = 0
        for i in range(num_ids):
            starts[((source_keys[i] >> shift) & (RADIX - 1)) + 1] += 1
        for digit in range(RADIX):
            starts[digit + 1] += starts[digit]
        for i in range(num_ids):
            digit = (source_keys[i] >> shift) & (RADIX - 1)
            place = starts[digit]
            starts[digit] = place + 1
            target_keys[place] = source_keys[i]
            target[place] = source[i]
        source_keys, target_keys = target_keys, source_keys
        source, target = target, source
        shift += RADIX_BITS
    num_distinct = 0
    for i in range(num_ids):
        order[start + i] = source[i]
        if i == 0 or source_keys[i] != source_keys[i - 1]:
            rows[start + num_distinct] = source_keys[i] + lowest
            segments[start + num_distinct] = start + i
            num_distinct += 1
    return num_distinct
