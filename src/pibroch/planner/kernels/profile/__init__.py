"""Count accesses to rows, and the batches in which they occur."""

from pibroch.planner.kernels.profile.numba import count_batch

__all__ = ["count_batch"]
