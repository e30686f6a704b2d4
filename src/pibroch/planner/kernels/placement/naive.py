"""What Algorithm 1 means, without incremental bookkeeping.

Shapes as in :mod:`pibroch.planner.kernels.placement.numba`.
"""

from __future__ import annotations

import numpy as np

from pibroch.kernels.arrays import Array


def sources_of(held: Array, home: int, cost: Array) -> list[int]:
    """From which shard each reads a partition: itself, or the cheapest.

    Of equally cheap ones it is the home, else the next cyclically.
    """
    num_shards = len(cost)
    out = []
    for reader in range(num_shards):
        # ties are broken the same way everywhere, or readers of one partition would crowd one
        # holder
        key = {
            shard: (cost[reader, shard], shard != home, (shard - reader) % num_shards)
            for shard in range(num_shards)
            if held[shard]
        }
        out.append(reader if held[reader] else min(key, key=lambda shard: key[shard]))
    return out


def replicate(
    order: Array, weight: Array, memory: Array, home: Array, cost: Array, available: Array
) -> tuple[Array, Array]:
    """Holders ``[P, W]`` and sources ``[P, W]``; every link is summed anew for each copy."""
    num_partitions = len(home)
    num_shards = len(cost)
    held = np.zeros((num_partitions, num_shards), bool)
    held[np.arange(num_partitions), home] = True
    available = available.copy()
    going = set(range(num_shards))
    source = np.array([sources_of(held[p], home[p], cost) for p in range(num_partitions)])
    while going:
        reader = min(going, key=lambda shard: (-available[shard], shard))
        link = np.zeros(num_shards)
        for partition in range(num_partitions):
            link[source[partition, reader]] += (
                weight[partition] * cost[reader, source[partition, reader]]
            )
        # what a shard reads from itself crosses no link
        link[reader] = 0.0
        fitting = [
            partition
            for worst in np.argsort(-link, kind="stable")
            if worst != reader and link[worst] > 1e-9
            for partition in order
            if source[partition, reader] == worst
            and memory[partition] <= available[reader]
            and weight[partition] > 0
        ]
        if not fitting:
            going.remove(reader)
            continue
        held[fitting[0], reader] = True
        available[reader] -= memory[fitting[0]]
        source[fitting[0]] = sources_of(held[fitting[0]], home[fitting[0]], cost)
    return held, source
