"""What looking codes up means: a dictionary, without a hash table."""

from __future__ import annotations

import numpy as np

from pibroch.data.kernels.vocabulary.numba import EMPTY_SLOT, FIRST_ROW, MISSING_ROW, UNKNOWN_ROW
from pibroch.kernels.arrays import Array


def look_up(codes: Array, vocabulary: Array, missing: int) -> Array:
    """Rows of codes ``[V]``."""
    rows = {code: FIRST_ROW + place for place, code in enumerate(vocabulary.tolist())}
    rows[int(missing)] = MISSING_ROW
    return np.array([rows.get(code, UNKNOWN_ROW) for code in codes.tolist()], np.int32)


def first_not_found(vocabulary: Array, slots: Array) -> int:
    """The first code that is not at its own place in the table, or -1."""
    for index, code in enumerate(vocabulary.tolist()):
        run = np.roll(slots, -(code % len(slots))).tolist()
        run = run[: run.index(EMPTY_SLOT)]
        if next((place for place in run if vocabulary[place] == code), None) != index:
            return index
    return -1
