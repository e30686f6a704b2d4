"""Row ids redirected by a hash table of the rows that have a newer version.

V ids, U changed rows in the order of their versions, S slots, a power of two above twice the rows
that can be among them: a slot holds a place in ``changed``, or -1. A row that changed twice is
found at its last place.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.arrays import Ints
from pibroch.kernels.policy import kernel

_EMPTY = -1
# Fibonacci hashing of 31 bits, whose product fits a signed word
_FACTOR = 0x9E3779B1
_WORD = 0xFFFFFFFF


def slots_of(
    changed: Ints, most: int, before: NDArray[np.int32] | None = None, num_before: int = 0
) -> NDArray[np.int32]:
    """The hash table of changed rows ``[U]``, int32 ``[S]``.

    Args:
        changed: rows, some of them several times.
        most: how many different ones there are at most.
        before: the table of the first ``num_before`` of them: only the others are entered into a
            copy, as long as that has room.
        num_before: see ``before``.
    """
    bits = max(4, (2 * min(len(changed), most)).bit_length())
    if before is not None and len(before) == 1 << bits:
        slots = before.copy()
    else:
        slots = np.full(1 << bits, _EMPTY, np.int32)
        num_before = 0
    fill_slots(changed, slots, 32 - bits, num_before)
    return slots


@kernel
def fill_slots(changed: Ints, slots: NDArray[np.int32], shift: int, start: int) -> None:
    """Enter changed rows from ``start`` on; ``shift`` is 32 less the bits of a slot's number."""
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
        slot = ((((row ^ (row >> 31)) & 0x7FFFFFFF) * _FACTOR) & _WORD) >> shift
        newest = row
        while slots[slot] != _EMPTY:
            if changed[slots[slot]] == row:
                newest = first + np.int64(slots[slot])
                break
            slot = (slot + 1) & mask
        out[position] = newest
