"""Numbers as planes of bytes."""

from pibroch.kernels.planes.numba import join, split

__all__ = ["join", "split"]
