"""Samples of an encoded split into minibatches, and a check of their offsets."""

from pibroch.kernels.samples.numba import first_fall, gather_bags, gather_ids, gather_samples

__all__ = ["first_fall", "gather_bags", "gather_ids", "gather_samples"]
