"""Numbers in shared memory that only grow, and waiting for them."""

from pibroch.collectives.kernels.words.numba import read, wait, write

__all__ = ["read", "wait", "write"]
