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
) -> int:
    """Group the positions of equal ids.

    Args:
        row_ids: ``[V]``.
        sequence: ``[V]``, the positions in the order in which they are to be kept.
        rows: ``[V]``, receives the U distinct ids, rising.
        segments: ``[V + 1]``, receives U + 1 bounds: row u has the positions ``order[segments[u] : segments[u + 1]]``.
        order: ``[V]``, receives the positions grouped by row.

    Returns:
        U, the number of distinct ids.
    """
    num_ids = len(row_ids)
    if num_ids == 0:
        segments[0] = 0
        return 0
    lowest, highest = row_ids[0], row_ids[0]
    for position in range(num_ids):
        lowest, highest = min(lowest, row_ids[position]), max(highest, row_ids[position])
    source_keys, target_keys = np.empty(num_ids, np.int64), np.empty(num_ids, np.int64)
    source, target = np.empty(num_ids, np.int32), np.empty(num_ids, np.int32)
    for i in range(num_ids):
        source[i] = sequence[i]
        source_keys[i] = row_ids[sequence[i]] - lowest
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
        order[i] = source[i]
        if i == 0 or source_keys[i] != source_keys[i - 1]:
            rows[num_distinct] = source_keys[i] + lowest
            segments[num_distinct] = i
            num_distinct += 1
    segments[num_distinct] = num_ids
    return num_distinct
