"""The parts of the logits of a factorisation machine."""

from pibroch.data.kernels.click_model.numba import sums

__all__ = ["sums"]
