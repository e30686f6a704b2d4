"""When the tasks of a graph begin and end, where some share a resource evenly."""

from pibroch.sim.kernels.events.numba import run

__all__ = ["run"]
