"""Count accesses to rows, and the batches in which they occur."""

from pibroch.kernels.profile.numba import count_batch

__all__ = ["count_batch"]
