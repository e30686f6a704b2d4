"""Group equal row ids by a stable radix sort: each row's positions keep their order.

V ids, U distinct rows. Cost O(V) for each 11 bits of the span of the ids. What is moved is a pair
in one integer, 32 bits of an id above its position, so that no id is read through a position: of
53,000 ids 3.0 to 4.0 ns each, 3.6 to 5.6 when positions alone are moved; of 400,000 half. Places
are unsigned: for signed ones numba adds a test for negative indices.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.policy import kernel

RADIX_BITS = 11  # 2,048 counters stay in the first-level cache
HALF = 32  # bits of a pair
LOWER_HALF = np.uint64(0xFFFFFFFF)


@kernel
def sample_major_sequence(
    offsets: NDArray[np.int64], num_features: int, sequence: NDArray[np.int32]
) -> None:
    """Positions of feature-major bags in the order sample, feature, place in the bag.

    Needed where several features read one table: gradients are summed in sample order (design,
    section 2).
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
def _num_bits(number: int) -> int:
    bits = 0
    while bits < 63 and number >> bits:
        bits += 1
    return bits


@kernel
def _begin_places(counts: NDArray[np.uint32]) -> None:
    """Make of how many there are of each digit where each one's first goes."""
    filled = 0
    for digit in range(len(counts)):
        counts[digit], filled = filled, filled + counts[digit]


@kernel
def _sort(
    pairs: NDArray[np.uint64], others: NDArray[np.uint64], bits: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Sort stably by the lowest ``bits`` of the upper halves; both arrays, the sorted one first."""
    num_passes = max(1, (bits + RADIX_BITS - 1) // RADIX_BITS)
    digit_bits = (bits + num_passes - 1) // num_passes
    mask = np.uint64((1 << digit_bits) - 1)
    places = np.empty(1 << digit_bits, np.uint32)
    num_ids = np.uint64(len(pairs))
    for number in range(num_passes):
        shift = np.uint64(HALF + number * digit_bits)
        places[:] = 0
        for i in range(num_ids):
            places[(pairs[i] >> shift) & mask] += 1
        _begin_places(places)
        for i in range(num_ids):
            pair = pairs[i]
            digit = (pair >> shift) & mask
            others[places[digit]] = pair
            places[digit] += 1
        pairs, others = others, pairs
    return pairs, others


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
    """Group the positions of equal ids among ``sequence[start:stop]``; returns U, of the range.

    See :func:`pibroch.kernels.dedupe.dedupe`. Row u has the positions in ``order`` from
    ``segments[start + u]`` to the next row's.
    """
    if start == stop:
        return 0
    lowest = highest = row_ids[sequence[start]]
    for i in range(start, stop):
        lowest = min(lowest, row_ids[sequence[i]])
        highest = max(highest, row_ids[sequence[i]])
    span_bits = _num_bits(highest - lowest)
    num_ids = np.uint64(stop - start)
    first = np.uint64(start)
    pairs = np.empty(num_ids, np.uint64)
    others = np.empty(num_ids, np.uint64)
    for i in range(num_ids):
        others[i] = sequence[first + i]
    for low in range(0, max(1, span_bits), HALF):
        for i in range(num_ids):
            position = others[i] & LOWER_HALF
            key = np.uint64(row_ids[position] - lowest) >> np.uint64(low)
            pairs[i] = (key << np.uint64(HALF)) | position
        pairs, others = _sort(pairs, others, min(span_bits - low, HALF))
        pairs, others = others, pairs
    end = first
    is_whole = span_bits <= HALF
    last_row = row_ids[others[0] & LOWER_HALF]
    segments[first] = start
    for i in range(num_ids):
        position = others[i] & LOWER_HALF
        row = np.int64(others[i] >> np.uint64(HALF)) + lowest if is_whole else row_ids[position]
        order[first + i] = position
        # without a branch, which no processor could foresee: the next row begins behind this place
        end += np.uint64(row != last_row)
        last_row = row
        rows[end] = row
        if i + np.uint64(1) < num_ids:
            segments[end + np.uint64(1)] = first + i + np.uint64(1)
    return int(end - first) + 1
