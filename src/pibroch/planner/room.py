"""Bytes that each shard may hold, and whether a placement keeps to them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

import pibroch.planner.cost as costs
from pibroch.errors import ConfigError
from pibroch.planner.partition import Partitions, TableSize, total_bytes
from pibroch.planner.replicate import PlacedPartitions
from pibroch.planner.topology import ClusterTopology

Floats = NDArray[np.float64]


def rooms(tables: Sequence[TableSize], topology: ClusterTopology, extra: float) -> Floats:
    """Bytes that each shard may hold, ``[W]``.

    Its part of the tables and of the budget, at most its memory.

    Raises:
        ConfigError: when the tables do not fit.
    """
    total = total_bytes(tables)
    memory = topology.memory_bytes
    if total > memory.sum():
        raise ConfigError(
            f"{memory.sum():,.0f} bytes of memory on {topology.num_ranks} ranks for tables of"
            f" {total:,} bytes",
            f"{total / topology.num_ranks:,.0f} bytes a rank",
            "use more ranks, smaller tables, or an optimizer with less state",
        )
    is_known = np.isfinite(memory).all()
    share = (
        memory / memory.sum() if is_known else np.full(topology.num_ranks, 1 / topology.num_ranks)
    )
    return np.minimum(total * (1 + extra) * share, memory)


def check_fit(partitions: Partitions, placed: PlacedPartitions, topology: ClusterTopology) -> None:
    """Raise a ``ConfigError`` for a placement that exceeds a rank's memory."""
    used = costs.memory(partitions.memory_bytes, placed.held)
    over = np.flatnonzero(used > topology.memory_bytes)
    if len(over):
        rank = int(over[0])
        raise ConfigError(
            f"no placement in which rank {rank} has less than {used[rank]:,.0f} bytes",
            f"at most {topology.memory_bytes[rank]:,.0f}, its memory",
            "give the ranks a little more memory than the tables need, or choose a smaller"
            " --threshold",
        )
