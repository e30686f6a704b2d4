"""Rows into messages and out of them: whole records, and weights alone, for several ranks in one buffer.

The buffer has for each rank in turn its records ``[whole, W]``, then its weights ``[lent, D]``.
"""

from __future__ import annotations

from pibroch.kernels.arrays import Ints, Records
from pibroch.kernels.memory import MAX_SHORT_DIM, prefetch_row
from pibroch.kernels.policy import kernel

AHEAD = 8


@kernel
def copy_out(records: Records, places: Ints, width: int, out: Records, at: int, begin: int, end: int) -> int:
    """Write ``width`` floats of each of ``places[begin:end]`` to ``out`` from ``at`` on; returns where they end."""
    last, is_long = len(places) - 1, width > MAX_SHORT_DIM
    for i in range(begin, end):
        prefetch_row(records, places[min(i + AHEAD, last)], width, is_long)
        place = places[i]
        for d in range(width):
            out[at + d] = records[place, d]
        at += width
    return at


@kernel
def copy_in(message: Records, at: int, places: Ints, width: int, records: Records, begin: int, end: int) -> int:
    """The inverse of :func:`copy_out`."""
    for i in range(begin, end):
        place = places[i]
        for d in range(width):
            records[place, d] = message[at + d]
        at += width
    return at


@kernel
def pack(records: Records, whole: Ints, lent: Ints, counts: Ints, dim: int, out: Records) -> None:
    """Fill a message.

    Args:
        records: float32 ``[places, W]``.
        whole: places of the records that go, grouped by rank.
        lent: places of the weights that go, grouped by rank.
        counts: ``[2, ranks]``, how many of ``whole`` and of ``lent`` each rank gets.
        dim: weights in a row.
        out: float32, as long as all of it.
    """
    at, first_whole, first_lent = 0, 0, 0
    for rank in range(counts.shape[1]):
        end = first_whole + counts[0, rank]
        at = copy_out(records, whole, records.shape[1], out, at, first_whole, end)
        first_whole, end = end, first_lent + counts[1, rank]
        at = copy_out(records, lent, dim, out, at, first_lent, end)
        first_lent = end


@kernel
def unpack(message: Records, whole: Ints, lent: Ints, counts: Ints, dim: int, records: Records) -> None:
    """Put a message's rows to their places; arguments as in :func:`pack`, as the receiver knows them."""
    at, first_whole, first_lent = 0, 0, 0
    for rank in range(counts.shape[1]):
        end = first_whole + counts[0, rank]
        at = copy_in(message, at, whole, records.shape[1], records, first_whole, end)
        first_whole, end = end, first_lent + counts[1, rank]
        at = copy_in(message, at, lent, dim, records, first_lent, end)
        first_lent = end
