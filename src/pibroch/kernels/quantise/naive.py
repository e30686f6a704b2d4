"""What rows of bytes mean, in plain NumPy. Shapes as in :mod:`pibroch.kernels.quantise.numba`.

A row is its scale and its offset, float32 each, then a byte a weight: ``weight = offset + scale *
byte``; zeros fill it up to whole words.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.arrays import Bytes, Ints, Records

HEADER_BYTES = 8
LEVELS = 255
SMALLEST_SCALE = np.float32(1e-30)
"""A row whose weights lie closer together is taken as all alike: one over the scale must be finite.
"""


def record_bytes(dim: int) -> int:
    """Bytes of a row of ``dim`` weights.

    >>> record_bytes(64), record_bytes(17)
    (72, 28)
    """
    return -(-(HEADER_BYTES + dim) // 4) * 4


def quantise(weights: Records) -> Bytes:
    """Rows ``[R, W]`` of float32 weights ``[R, D]``.

    Each weight is off by half a step of its row at most.
    """
    num_rows, dim = weights.shape
    wide = weights.astype(np.float64)
    low = wide.min(1, keepdims=True)
    high = wide.max(1, keepdims=True)
    scale = ((high - low) / LEVELS).astype(np.float32)
    scale[scale < SMALLEST_SCALE] = 0
    steps = np.divide(wide - low, scale, out=np.zeros_like(wide), where=scale > 0)
    records = np.zeros((num_rows, record_bytes(dim)), np.uint8)
    records[:, :4] = scale.view(np.uint8)
    records[:, 4:8] = low.astype(np.float32).view(np.uint8)
    records[:, 8 : 8 + dim] = np.clip(np.floor(steps + 0.5), 0, LEVELS)
    return records


def weights_of(records: Bytes, dim: int) -> Records:
    """Weights ``[R, D]`` that rows of bytes stand for."""
    scale, offset = (
        np.ascontiguousarray(records[:, at : at + 4]).view(np.float32) for at in (0, 4)
    )
    return offset + scale * records[:, HEADER_BYTES : HEADER_BYTES + dim].astype(np.float32)


def take(row_ids: Ints, first_rows: Ints, parts: list[NDArray[np.uint16]]) -> NDArray[np.uint16]:
    """Rows ``[V, W / 2]``, each from the part in which it lies; zeros for one that is in none.

    >>> part = np.array([[1, 2], [3, 4]], np.uint16)
    >>> take(np.array([11, 12, 3]), np.array([10]), [part]).tolist()
    [[3, 4], [0, 0], [0, 0]]
    """
    out = np.zeros((len(row_ids), parts[0].shape[1]), np.uint16)
    for position, row in enumerate(row_ids):
        for first, part in zip(first_rows, parts, strict=True):
            if first <= row < first + len(part):
                out[position] = part[row - first]
    return out


def add_rows(
    weights: Records,
    first_row: int,
    row_ids: Ints,
    offsets: Ints,
    scale: Records,
    pooled_BFD: NDArray[np.float32],
) -> None:
    """Add to each bag's sum those of its rows that lie here.

    ``weights[r]`` is row ``first_row + r``.
    """
    num_samples, num_features, _ = pooled_BFD.shape
    for bag in range(num_samples * num_features):
        feature, sample = divmod(bag, num_samples)
        for position in range(offsets[bag], offsets[bag + 1]):
            row = row_ids[position] - first_row
            if 0 <= row < len(weights):
                factor = scale[position] if len(scale) else np.float32(1)
                pooled_BFD[sample, feature] += factor * weights[row]
