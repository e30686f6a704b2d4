"""DLRM's dot interaction, forward and backward."""

from pibroch.kernels.interaction.numba import backward, forward

__all__ = ["backward", "forward"]
