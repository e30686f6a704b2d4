"""Ids of several tables as distinct ones, counted, in few bytes."""

from pibroch.kernels.counted_ids.numba import MAX_BYTES, decode, encode

__all__ = ["MAX_BYTES", "decode", "encode"]
