"""Dropout whose mask is a function of numbers, not of a generator's state."""

from pibroch.kernels.dropout.numba import dropout

__all__ = ["dropout"]
