"""Give partitions homes and copies."""

from pibroch.planner.kernels.placement.numba import (
    add_memory,
    add_traffic,
    copy_everywhere,
    find_sources,
    nearer_shards,
    place,
    replicate,
)
from pibroch.planner.kernels.placement.search import improve
from pibroch.planner.kernels.placement.state import Placed, Problem

__all__ = [
    "Placed",
    "Problem",
    "add_memory",
    "add_traffic",
    "copy_everywhere",
    "find_sources",
    "improve",
    "nearer_shards",
    "place",
    "replicate",
]
