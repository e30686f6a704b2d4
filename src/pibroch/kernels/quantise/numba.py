"""Rows of bytes, halves or floats, looked up where they lie: in one of several mapped files.

B samples, F features, D weights in a row, V ids, R rows here, W bytes of a row
(:func:`naive.record_bytes`). Bags are feature-major: bag ``f * B + b`` holds ``row_ids[offsets[bag]
: offsets[bag + 1]]``. Here lie the rows from ``first_row`` on; others are left to the kernel's next
call, on another file, so ``pooled_BFD`` begins as zeros. An empty ``scale`` means ones.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.arrays import Bytes, Ints, Records, Stored
from pibroch.kernels.bits import half_widened
from pibroch.kernels.memory import MAX_SHORT_DIM, numbers_at, prefetch_row
from pibroch.kernels.policy import kernel
from pibroch.kernels.quantise.naive import HEADER_BYTES, LEVELS, SMALLEST_SCALE

AHEAD = 16  # rows between the one that is read and the one that is fetched


@kernel
def quantise(weights: Records, records: Bytes, words: Records, start: int, stop: int) -> None:
    """Rows ``start`` to ``stop`` of ``weights`` ``[R, D]`` to ``records`` ``[R, W]``.

    ``words`` is these as float32.
    """
    dim = weights.shape[1]
    for row in range(start, stop):
        low = high = weights[row, 0]
        for d in range(1, dim):
            low = min(low, weights[row, d])
            high = max(high, weights[row, d])
        scale = np.float32((np.float64(high) - np.float64(low)) / LEVELS)
        if scale < SMALLEST_SCALE:
            scale = np.float32(0.0)
        words[row, 0] = scale
        words[row, 1] = low
        for d in range(dim):
            steps = 0.0
            if scale > 0:
                steps = np.floor(
                    (np.float64(weights[row, d]) - np.float64(low)) / np.float64(scale) + 0.5
                )
            records[row, HEADER_BYTES + d] = np.uint8(min(max(steps, 0.0), float(LEVELS)))
        for d in range(HEADER_BYTES + dim, records.shape[1]):
            records[row, d] = 0


@kernel
def take(
    row_ids: Ints,
    first_rows: Ints,
    num_rows: Ints,
    addresses: Ints,
    out: NDArray[np.uint16],
    start: int,
    stop: int,
) -> None:
    """Copy the rows ``start`` to ``stop`` of those asked for from the parts in which they lie."""
    width = out.shape[1]
    for position in range(start, stop):
        row = row_ids[position]
        part = np.searchsorted(first_rows, row, side="right") - 1
        if part < 0 or row - first_rows[part] >= num_rows[part]:
            out[position] = 0
            continue
        begin = addresses[part] + 2 * width * (row - first_rows[part])
        out[position] = numbers_at(out, begin, width)


@kernel
def add_bytes(
    records: Bytes,
    words: Records,
    first_row: int,
    row_ids: Ints,
    offsets: Ints,
    scale: Records,
    pooled_BFD: NDArray[np.float32],
    start: int,
    stop: int,
) -> None:
    """Add rows of bytes to the bags ``start`` to ``stop``.

    ``words`` is ``records`` as float32 ``[R, W / 4]``.
    """
    num_samples, _, dim = pooled_BFD.shape
    num_rows = len(records)
    floats = words.shape[1]
    last = len(row_ids) - 1
    scaled = len(scale) > 0
    is_long = floats > MAX_SHORT_DIM
    for bag in range(start, stop):
        feature = bag // num_samples
        sample = bag - feature * num_samples
        for position in range(offsets[bag], offsets[bag + 1]):
            ahead = row_ids[min(position + AHEAD, last)] - first_row
            if 0 <= ahead < num_rows:
                prefetch_row(words, ahead, floats, is_long)
            row = row_ids[position] - first_row
            if row < 0 or row >= num_rows:
                continue
            factor = scale[position] if scaled else np.float32(1.0)
            step = factor * words[row, 0]
            offset = factor * words[row, 1]
            for d in range(dim):
                pooled_BFD[sample, feature, d] += offset + step * np.float32(
                    records[row, HEADER_BYTES + d]
                )


@kernel
def add_numbers(
    records: Stored,
    first_row: int,
    row_ids: Ints,
    offsets: Ints,
    scale: Records,
    pooled_BFD: NDArray[np.float32],
    start: int,
    stop: int,
) -> None:
    """Add rows to the bags ``start`` to ``stop``.

    float32 ``[R, D]``, or the bits of float16 as uint16.
    """
    num_samples, _, dim = pooled_BFD.shape
    num_rows = len(records)
    floats = (dim * records.itemsize + 3) // 4
    last = len(row_ids) - 1
    scaled = len(scale) > 0
    is_long = floats > MAX_SHORT_DIM
    for bag in range(start, stop):
        feature = bag // num_samples
        sample = bag - feature * num_samples
        for position in range(offsets[bag], offsets[bag + 1]):
            ahead = row_ids[min(position + AHEAD, last)] - first_row
            if 0 <= ahead < num_rows:
                prefetch_row(records, ahead, floats, is_long)
            row = row_ids[position] - first_row
            if row < 0 or row >= num_rows:
                continue
            factor = scale[position] if scaled else np.float32(1.0)
            for d in range(dim):
                pooled_BFD[sample, feature, d] += factor * half_widened(records[row, d])
