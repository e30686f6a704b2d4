"""Row ids redirected by a table of the rows that have a newer version.

V ids, U changed rows in the order of their versions, S slots, each of which holds a place in
``changed``, or -1. A row that changed twice is found at its last place. Where few rows changed it
is a hash table, S a power of two above twice the rows that can be among them. Where that is no
smaller than a slot for every row there is, a row's slot is its own number, and ``changed`` is not
read.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.arrays import Ints
from pibroch.kernels.policy import kernel

_EMPTY = -1
_OWN_NUMBER = -1  # in place of a shift
# Fibonacci hashing of 31 bits, whose product fits a signed word
_FACTOR = 0x9E3779B1
_WORD = 0xFFFFFFFF


def slots_of(
    changed: Ints, most: int, before: NDArray[np.int32] | None = None, num_before: int = 0
) -> NDArray[np.int32]:
    """The table of changed rows ``[U]``, int32 ``[S]``.

    Args:
        changed: rows from 0 to ``most - 1``, some of them several times.
        most: rows there are.
        before: the table of the first ``num_before`` of them: only the others are entered into a
            copy, as long as that has room.
        num_before: see ``before``.
    """
    bits = max(4, (2 * min(len(changed), most)).bit_length())
    if 1 << bits >= most:
        return numbered(np.full(most, _EMPTY, np.int32), changed, 0)
    if before is not None and len(before) == 1 << bits:
        slots = before.copy()
    else:
        slots = np.full(1 << bits, _EMPTY, np.int32)
        num_before = 0
    fill_slots(changed, slots, shift_of(slots, most), num_before)
    return slots


def numbered(slots: NDArray[np.int32], changed: Ints, place: int) -> NDArray[np.int32]:
    """A copy of slots by the rows' own numbers, with rows whose first has this place."""
    slots = slots.copy()
    slots[changed] = np.arange(place, place + len(changed), dtype=np.int32)
    return slots


def shift_of(slots: NDArray[np.int32], most: int) -> int:
    """By how much a row's product is shifted, to be the number of its slot."""
    return _OWN_NUMBER if len(slots) == most else 33 - len(slots).bit_length()


@kernel
def fill_slots(changed: Ints, slots: NDArray[np.int32], shift: int, start: int) -> None:
    """Enter changed rows from ``start`` on; ``shift`` is that of :func:`shift_of`."""
    mask = len(slots) - 1
    for place in range(start, len(changed)):
        row = changed[place]
        slot = ((((row ^ (row >> 31)) & 0x7FFFFFFF) * _FACTOR) & _WORD) >> shift
        while slots[slot] != _EMPTY and changed[slots[slot]] != row:
            slot = (slot + 1) & mask
        slots[slot] = place


@kernel
def redirect(
    row_ids: Ints,
    changed: Ints,
    slots: NDArray[np.int32],
    shift: int,
    first: int,
    out: Ints,
    start: int,
    stop: int,
) -> None:
    """See :func:`pibroch.kernels.overlay.redirect`; of the ids ``start`` to ``stop``."""
    mask = len(slots) - 1
    for position in range(start, stop):
        row = row_ids[position]
        newest = row
        if shift == _OWN_NUMBER:
            if 0 <= row < len(slots) and slots[row] != _EMPTY:
                newest = first + np.int64(slots[row])
            out[position] = newest
            continue
        slot = ((((row ^ (row >> 31)) & 0x7FFFFFFF) * _FACTOR) & _WORD) >> shift
        while slots[slot] != _EMPTY:
            if changed[slots[slot]] == row:
                newest = first + np.int64(slots[slot])
                break
            slot = (slot + 1) & mask
        out[position] = newest
