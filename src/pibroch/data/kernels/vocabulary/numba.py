"""Codes to rows: hash tables over the codes of vocabularies.

V codes; F features of B samples each. A vocabulary is uint64, the code of row ``FIRST_ROW + i`` at
place i. Its hash table is int32 ``[slots]``, a power of two of them, by open addressing: slot
``code mod slots`` or the next free one holds a code's place, ``EMPTY_SLOT`` none.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.policy import kernel

EMPTY_SLOT = -1
UNKNOWN_ROW = 0
"""Row of every table for an id that training has not seen (or has cut)."""
MISSING_ROW = 1
"""Row of every table for a missing value."""
FIRST_ROW = 2
"""First row of every table for ordinary ids."""


@kernel
def hash_table(vocabulary: NDArray[np.uint64], num_slots: int) -> NDArray[np.int32]:
    """Open addressing: slot ``code mod num_slots`` or the next free one holds the code's index."""
    slots = np.full(num_slots, EMPTY_SLOT, np.int32)
    mask = np.uint64(num_slots - 1)
    for index in range(len(vocabulary)):
        slot = vocabulary[index] & mask
        while slots[slot] != EMPTY_SLOT:
            slot = (slot + np.uint64(1)) & mask
        slots[slot] = index
    return slots


@kernel
def look_up(
    codes: NDArray[np.uint64],
    vocabulary: NDArray[np.uint64],
    slots: NDArray[np.int32],
    missing: np.uint64,
) -> NDArray[np.int32]:
    """Rows of codes ``[V]``; ``missing`` is the code that stands for no value."""
    rows = np.empty(len(codes), np.int32)
    mask = np.uint64(len(slots) - 1)
    for i in range(len(codes)):
        rows[i] = UNKNOWN_ROW
        if codes[i] == missing:
            rows[i] = MISSING_ROW
            continue
        slot = codes[i] & mask
        while slots[slot] != EMPTY_SLOT:
            if vocabulary[slots[slot]] == codes[i]:
                rows[i] = FIRST_ROW + slots[slot]
                break
            slot = (slot + np.uint64(1)) & mask
    return rows


@kernel
def first_not_found(
    vocabulary: NDArray[np.uint64], slots: NDArray[np.int32], start: int, stop: int
) -> int:
    """The first code from ``start`` to ``stop`` that is not found at its own place, or -1."""
    mask = np.uint64(len(slots) - 1)
    for index in range(start, stop):
        slot = vocabulary[index] & mask
        while slots[slot] != EMPTY_SLOT and vocabulary[slots[slot]] != vocabulary[index]:
            slot = (slot + np.uint64(1)) & mask
        if slots[slot] != index:
            return index
    return -1


@kernel
def look_up_stacked(
    codes: NDArray[np.uint64],
    places: NDArray[np.int64],
    vocabularies: NDArray[np.uint64],
    slots: NDArray[np.int32],
    first_code: NDArray[np.int64],
    first_slot: NDArray[np.int64],
    missing: np.uint64,
) -> NDArray[np.int64]:
    """As :func:`look_up` of each feature's codes ``[F, B]`` in the dictionary at its place."""
    rows = np.empty(codes.shape, np.int64)
    for feature in range(len(places)):
        place = places[feature]
        vocabulary = vocabularies[first_code[place] : first_code[place + 1]]
        rows[feature] = look_up(
            codes[feature], vocabulary, slots[first_slot[place] : first_slot[place + 1]], missing
        )
    return rows
