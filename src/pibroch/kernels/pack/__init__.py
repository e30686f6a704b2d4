"""Rows into messages and out of them."""

from pibroch.kernels.pack.numba import copy_out, pack, unpack

__all__ = ["copy_out", "pack", "unpack"]
