"""What rows and gradients need on their way between ranks."""

from pibroch.kernels.route.numba import Homes, gather_rows, places, resolve_addresses, scatter_rows

__all__ = ["Homes", "gather_rows", "places", "resolve_addresses", "scatter_rows"]
