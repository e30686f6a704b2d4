"""Bytes of uneven frequency in few bits."""

from pibroch.kernels.huffman.numba import decode, encode, max_bytes

__all__ = ["decode", "encode", "max_bytes"]
