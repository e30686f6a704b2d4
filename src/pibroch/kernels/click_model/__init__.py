"""The parts of the logits of a factorisation machine."""

from pibroch.kernels.click_model.numba import sums

__all__ = ["sums"]
