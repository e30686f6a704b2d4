"""Look rows up and pool them."""

from pibroch.kernels.gather_pool.numba import (
    gather_pool,
    gradient_sources,
    pooling_scale,
    resolve_rows,
)

__all__ = ["gather_pool", "gradient_sources", "pooling_scale", "resolve_rows"]
