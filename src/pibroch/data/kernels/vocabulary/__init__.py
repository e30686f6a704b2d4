"""Codes to rows, by the hash tables of vocabularies."""

from pibroch.data.kernels.vocabulary.numba import (
    EMPTY_SLOT,
    FIRST_ROW,
    MISSING_ROW,
    UNKNOWN_ROW,
    first_not_found,
    hash_table,
    look_up,
    look_up_stacked,
)

__all__ = [
    "EMPTY_SLOT",
    "FIRST_ROW",
    "MISSING_ROW",
    "UNKNOWN_ROW",
    "first_not_found",
    "hash_table",
    "look_up",
    "look_up_stacked",
]
