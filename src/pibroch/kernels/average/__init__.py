"""Exponential moving averages of rows, kept up lazily."""

from pibroch.kernels.average.numba import advance, averaged_rows

__all__ = ["advance", "averaged_rows"]
