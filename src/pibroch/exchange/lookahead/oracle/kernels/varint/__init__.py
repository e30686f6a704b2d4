"""Rising numbers in few bytes."""

from pibroch.exchange.lookahead.oracle.kernels.varint.numba import MAX_BYTES, decode, encode

__all__ = ["MAX_BYTES", "decode", "encode"]
