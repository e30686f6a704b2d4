"""Samples of an encoded split into minibatches, and checks of offsets and weights."""

from pibroch.data.kernels.samples.numba import (
    first_fall,
    first_not_finite,
    gather_bags,
    gather_ids,
    gather_samples,
)

__all__ = ["first_fall", "first_not_finite", "gather_bags", "gather_ids", "gather_samples"]
