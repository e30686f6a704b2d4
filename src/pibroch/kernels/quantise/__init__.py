"""Rows of bytes: how they are made, and how they are looked up where they lie."""

from pibroch.kernels.quantise.naive import record_bytes
from pibroch.kernels.quantise.numba import add_bytes, add_numbers, quantise

__all__ = ["add_bytes", "add_numbers", "quantise", "record_bytes"]
