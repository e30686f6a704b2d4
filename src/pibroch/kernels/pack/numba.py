"""Rows into messages and out of them: whole records, and weights alone, for several ranks at once.

The buffer has for each rank in turn its records ``[whole, W]``, then its weights ``[borrowed, D]``,
which are float32 there.
"""

from __future__ import annotations

from pibroch.kernels.arrays import Ints, Records, Stored
from pibroch.kernels.bits import cut_for, widened
from pibroch.kernels.memory import MAX_SHORT_DIM, prefetch_row
from pibroch.kernels.policy import kernel

AHEAD = 8


@kernel
def copy_out(
    records: Stored, places: Ints, width: int, out: Records, at: int, begin: int, end: int
) -> int:
    """Write ``width`` numbers of each of ``places[begin:end]`` to ``out`` from ``at`` on.

    They are written as float32; returns where they end.
    """
    last = len(places) - 1
    floats = (width * records.itemsize + 3) // 4
    is_long = floats > MAX_SHORT_DIM
    for i in range(begin, end):
        prefetch_row(records, places[min(i + AHEAD, last)], floats, is_long)
        place = places[i]
        for d in range(width):
            out[at + d] = widened(records[place, d])
        at += width
    return at


@kernel
def copy_in(
    message: Records, at: int, places: Ints, width: int, records: Stored, begin: int, end: int
) -> int:
    """The inverse of :func:`copy_out`.

    Bfloat16 weights come as such: no wire gives them bits that they did not have.
    """
    for i in range(begin, end):
        place = places[i]
        for d in range(width):
            records[place, d] = cut_for(records, message[at + d])
        at += width
    return at


@kernel
def pack(
    records: Records,
    stored: Stored,
    whole: Ints,
    borrowed: Ints,
    counts: Ints,
    dim: int,
    out: Records,
) -> None:
    """Fill a message.

    Args:
        records: float32 ``[places, W]``.
        stored: the same in the type of their weights.
        whole: places of the records that go, grouped by rank.
        borrowed: places of the weights that go, grouped by rank.
        counts: ``[2, ranks]``, how many of ``whole`` and of ``borrowed`` each rank gets.
        dim: weights in a row.
        out: float32, as long as all of it.
    """
    at = 0
    first_whole = 0
    first_borrowed = 0
    for rank in range(counts.shape[1]):
        end = first_whole + counts[0, rank]
        at = copy_out(records, whole, records.shape[1], out, at, first_whole, end)
        first_whole = end
        end = first_borrowed + counts[1, rank]
        at = copy_out(stored, borrowed, dim, out, at, first_borrowed, end)
        first_borrowed = end


@kernel
def unpack(
    message: Records,
    whole: Ints,
    borrowed: Ints,
    counts: Ints,
    dim: int,
    records: Records,
    stored: Stored,
) -> None:
    """Put a message's rows to their places.

    Arguments as in :func:`pack`, as the receiver knows them.
    """
    at = 0
    first_whole = 0
    first_borrowed = 0
    for rank in range(counts.shape[1]):
        end = first_whole + counts[0, rank]
        at = copy_in(message, at, whole, records.shape[1], records, first_whole, end)
        first_whole = end
        end = first_borrowed + counts[1, rank]
        at = copy_in(message, at, borrowed, dim, stored, first_borrowed, end)
        first_borrowed = end
