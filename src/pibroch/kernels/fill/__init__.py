"""Random fills of tables."""

from pibroch.kernels.fill.numba import fill_normal, fill_uniform

__all__ = ["fill_normal", "fill_uniform"]
