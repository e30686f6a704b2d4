"""Weights of 16 bits: bfloat16 in row records, float32 while an optimizer works on them."""

from pibroch.kernels.narrow.naive import widened
from pibroch.kernels.narrow.numba import keys_of, nearest

__all__ = ["keys_of", "nearest", "widened"]
