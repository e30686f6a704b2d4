"""Which rank trains which sample of a global batch, so that few rows cross between ranks."""

from pibroch.assignment.kernels.assign.numba import (
    LINE,
    Lanes,
    Room,
    Rules,
    count_transfers,
    enter,
    mark,
    place,
    settle,
)

__all__ = ["LINE", "Lanes", "Room", "Rules", "count_transfers", "enter", "mark", "place", "settle"]
