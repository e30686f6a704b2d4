"""Homes by greedy balance (OPER, Sec. 4.2) and copies by Algorithm 1 (Sec. 4.3).

P partitions, W shards. ``order`` lists partitions by falling bytes read for a byte of memory.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.policy import kernel

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@kernel
def place(
    order: Ints,
    weight: Floats,
    memory: Floats,
    by_memory: Flags,
    room: Floats,
    load: Floats,
    used: Floats,
    home: Ints,
) -> int:
    """Give each partition of ``order`` a home: access-bound ones the least loaded shard, memory-bound ones the emptiest.

    Among shards that are equally empty but for one partition, the least loaded is taken.

    Args:
        order: ``[n]``, partitions to place, in this order.
        weight: ``[P]``, what a partition adds to its shard's load.
        memory: ``[P]``, and to its memory.
        by_memory: ``[P]``, whether memory decides.
        room: ``[W]``, memory that a shard may use.
        load: ``[W]``, raised.
        used: ``[W]``, raised.
        home: ``[P]``, receives the shard.

    Returns:
        The number of partitions that fitted nowhere and lie on the emptiest shard all the same.
    """
    num_shards, misfits = len(room), 0
    for place in range(len(order)):
        partition = order[place]
        size, best, emptiest = memory[partition], -1, 0
        for shard in range(num_shards):
            # which share is smaller, without divisions
            if used[shard] * room[emptiest] < used[emptiest] * room[shard]:
                emptiest = shard
        level = used[emptiest] / room[emptiest]
        for shard in range(num_shards):
            if used[shard] + size > room[shard]:
                continue
            # within half a partition of the emptiest is as empty
            if (
                by_memory[partition]
                and used[shard] / room[shard] > level + 0.5 * size / room[shard]
            ):
                continue
            if (
                best < 0
                or load[shard] < load[best]
                or (load[shard] == load[best] and used[shard] < used[best])
            ):
                best = shard
        if best < 0:
            best = emptiest
            misfits += used[best] + size > room[best]
        home[partition] = best
        load[best] += weight[partition]
        used[best] += size
    return misfits


@kernel
def is_nearer(reader: int, shard: int, other: int, home: int, cost: Floats) -> bool:
    """Whether a reader that holds no copy reads from ``shard`` rather than from ``other``; see ``cost.sources``."""
    if cost[reader, shard] != cost[reader, other]:
        return bool(cost[reader, shard] < cost[reader, other])
    if shard == home or other == home:
        return bool(shard == home)
    num_shards = len(cost)
    return (shard - reader) % num_shards < (other - reader) % num_shards


@kernel
def _first_relief(
    reader: int, order: Ints, weight: Floats, memory: Floats, available: Floats, source: Ints, link: Floats, pointer: Ints,
    tried: Flags,
) -> int:  # fmt: skip
    """The first place in ``order`` of what relieves the reader's worst link and fits, or else its next worst; -1 for none.

    ``pointer`` ``[W, W]`` is moved past places that offer nothing; ``tried`` ``[W]`` is scratch.
    """
    num_shards, num_places = len(available), len(order)
    tried[:] = False
    tried[reader] = True
    for _ in range(num_shards - 1):
        worst = -1
        for shard in range(num_shards):
            if not tried[shard] and (worst < 0 or link[reader, shard] > link[reader, worst]):
                worst = shard
        if link[reader, worst] <= 0:
            break
        tried[worst] = True
        place = pointer[reader, worst]
        while place < num_places:
            partition = order[place]
            if (
                source[partition, reader] == worst
                and memory[partition] <= available[reader]
                and weight[partition] > 0
            ):
                pointer[reader, worst] = place
                return int(place)
            place += 1
        pointer[reader, worst] = place
    return -1


@kernel
def replicate(
    order: Ints,
    weight: Floats,
    memory: Floats,
    home: Ints,
    cost: Floats,
    available: Floats,
    held: Flags,
    source: Ints,
    link: Floats,
) -> int:
    """Algorithm 1: shard by shard, copy what relieves its worst link, until nothing more fits.

    Differs from the paper: a shard whose worst link offers nothing that fits goes on to its next worst, a shard is no link of
    its own, and among equally cheap holders readers follow ``cost.sources``.

    Args:
        order: ``[P]``, the partitions that may be copied, by falling worth.
        weight: ``[P]``, bytes that one reader gets of a partition in a step.
        memory: ``[P]``, bytes of a copy.
        home: ``[P]``.
        cost: ``[W, W]`` of a byte that row i reads from column j.
        available: ``[W]``, memory for copies; lowered.
        held: ``[P, W]``, which shards hold a partition; copies are added.
        source: ``[P, W]``, from which shard each reads; kept up to date.
        link: ``[W, W]``, cost of what i gets from j; kept up to date.

    Returns:
        The number of copies that were added.
    """
    num_shards, added = len(available), 0
    pointer = np.zeros(
        (num_shards, num_shards), np.int64
    )  # places before it offer this reader nothing on this link
    stopped, tried = np.zeros(num_shards, np.bool_), np.zeros(num_shards, np.bool_)
    num_stopped = 0
    while num_stopped < num_shards:
        reader = -1
        for shard in range(num_shards):
            if not stopped[shard] and (reader < 0 or available[shard] > available[reader]):
                reader = shard
        found = _first_relief(
            reader, order, weight, memory, available, source, link, pointer, tried
        )
        if found < 0:
            stopped[reader] = (
                True  # nothing that fits relieves it: for good, as its room only shrinks
            )
            num_stopped += 1
            continue
        partition = order[found]
        added += 1
        available[reader] -= memory[partition]
        held[partition, reader] = True
        link[reader, source[partition, reader]] -= (
            weight[partition] * cost[reader, source[partition, reader]]
        )
        source[partition, reader] = reader
        link[reader, reader] += weight[partition] * cost[reader, reader]
        for other in range(num_shards):
            before = source[partition, other]
            if held[partition, other] or not is_nearer(
                other, reader, before, home[partition], cost
            ):
                continue
            link[other, before] -= weight[partition] * cost[other, before]
            link[other, reader] += weight[partition] * cost[other, reader]
            source[partition, other] = reader
            pointer[other, reader] = min(
                pointer[other, reader], found
            )  # this very place may relieve it now
    return added
