"""What the pack kernels mean, without a thought of speed."""

from __future__ import annotations

import numpy as np

from pibroch.kernels.arrays import Ints, Records, Stored
from pibroch.kernels.narrow.naive import nearest, widened


def spans(counts: Ints, widths: tuple[int, int]) -> list[tuple[int, int, int, int]]:
    """For each rank and kind of rows: kind, first row, end, first float in the message."""
    parts = []
    first = [0, 0]
    at = 0
    for rank in range(counts.shape[1]):
        for kind in range(2):
            end = first[kind] + int(counts[kind, rank])
            parts.append((kind, first[kind], end, at))
            at += (end - first[kind]) * widths[kind]
            first[kind] = end
    return parts


def pack(
    records: Records,
    stored: Stored,
    whole: Ints,
    borrowed: Ints,
    counts: Ints,
    dim: int,
    out: Records,
) -> None:
    """For each rank in turn its ``whole`` records, then the weights of ``borrowed`` rows."""
    for kind, first, end, at in spans(counts, (records.shape[1], dim)):
        rows = widened(stored[borrowed[first:end], :dim]) if kind else records[whole[first:end]]
        out[at : at + rows.size] = rows.ravel()


def unpack(
    message: Records,
    whole: Ints,
    borrowed: Ints,
    counts: Ints,
    dim: int,
    records: Records,
    stored: Stored,
) -> None:
    """The inverse of :func:`pack` at the receiver's places."""
    for kind, first, end, at in spans(counts, (records.shape[1], dim)):
        width = (records.shape[1], dim)[kind]
        rows = message[at : at + (end - first) * width].reshape(-1, width)
        if kind:
            stored[borrowed[first:end], :dim] = (
                rows if stored.dtype == np.float32 else nearest(rows)
            )
        else:
            records[whole[first:end]] = rows
