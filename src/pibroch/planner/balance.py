"""Balanced homes (OPER, Sec. 4.2).

Partitions that are read often go to the least loaded shard, large ones to the emptiest.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pibroch.planner.kernels import placement as kernels

Floats = NDArray[np.float64]
NONE = 0
SOME = 1
ALL = 2
"""How many shards besides the home are to hold a partition.

Layers that are balanced each for itself.
"""


def by_worth(weight: Floats, memory: Floats) -> NDArray[np.int64]:
    """Partitions by falling bytes read for a byte of memory, int64 ``[P]``."""
    return np.argsort(-weight / memory, kind="stable")


def place_homes(
    weight: Floats,
    memory: Floats,
    is_access_bound: NDArray[np.bool_],
    room: Floats,
    layer: NDArray[np.int64] | None = None,
) -> tuple[NDArray[np.int64], int]:
    """Homes of all partitions.

    What every shard will hold burdens all alike, wherever its home is, and what has some copies
    burdens others than what has none. So each layer is balanced for itself: with one load for all,
    hot partitions that are copied later would have made up for others that stay.

    Args:
        weight: ``[P]``, bytes that one reader gets of a partition in a step.
        memory: ``[P]``, bytes of its records.
        is_access_bound: ``[P]``, whether accesses decide where it goes, else memory does.
        room: ``[W]``, bytes that each shard may hold.
        layer: ``[P]``, how many copies are expected: ``NONE``, ``SOME`` or ``ALL``; none by
            default.

    Returns:
        Homes ``[P]``, and how many partitions lie where they do not fit.
    """
    num_shards = len(room)
    order = by_worth(weight, memory)
    layer = np.zeros(len(weight), np.int64) if layer is None else layer
    home = np.zeros(len(weight), np.int64)
    by_memory = ~is_access_bound
    everywhere = layer == ALL
    used = np.full(num_shards, memory[everywhere].sum())
    share = room / room.sum()
    limit = np.minimum(room, used + memory[~everywhere].sum() * share + memory.max(initial=0.0))
    misfits = 0
    for kind in (SOME, NONE):
        members = order[layer[order] == kind]
        misfits += kernels.place(
            members, weight, memory, by_memory, limit, np.zeros(num_shards), used, home
        )
    spread = np.full(num_shards, np.inf)
    members = order[everywhere[order]]
    nothing = np.zeros(len(weight))
    kernels.place(
        members,
        memory,
        nothing,
        ~everywhere,
        spread,
        np.zeros(num_shards),
        np.zeros(num_shards),
        home,
    )
    return home, misfits
