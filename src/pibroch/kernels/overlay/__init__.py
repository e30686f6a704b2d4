"""Rows that lie elsewhere: where a few of many rows have a newer version, ids are redirected before they are looked up."""

from pibroch.kernels.overlay.numba import redirect, slots_of

__all__ = ["redirect", "slots_of"]
