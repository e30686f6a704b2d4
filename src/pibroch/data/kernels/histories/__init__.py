"""What each user did before each record of a log."""

from pibroch.data.kernels.histories.numba import EMPTY_SLOT, histories

__all__ = ["EMPTY_SLOT", "histories"]
