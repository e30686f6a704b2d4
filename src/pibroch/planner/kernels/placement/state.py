"""A placement under search, and the sums that follow from it. P partitions, W shards."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.policy import kernel
from pibroch.planner.kernels.placement.numba import Flags, Floats, Ints, Nearer, Shards


class Problem(NamedTuple):
    """What a search may not change.

    Attributes:
        order: int64 ``[P]``, partitions by falling bytes read a byte of memory.
        place_of: int64 ``[P]``, the inverse of ``order``.
        weight: ``[P]``, bytes that one reader gets of a partition in a step.
        lookup: ``[P]``, bytes that are looked up for one reader in a step.
        memory: ``[P]``, bytes of a copy.
        cost: ``[W, W]`` of a byte that row i reads from column j.
        nearer: of these costs.
        room: ``[W]``, bytes that each shard may hold.
    """

    order: Ints
    place_of: Ints
    weight: Floats
    lookup: Floats
    memory: Floats
    cost: Floats
    nearer: Nearer
    room: Floats


class Placed(NamedTuple):
    """``home`` ``[P]``, ``held`` ``[P, W]``, ``source`` ``[P, W]`` as in ``replicate``."""

    home: Ints
    held: Flags
    source: Shards


class Sums(NamedTuple):
    """What follows from a placement.

    Attributes:
        link: ``[W, W]``, cost of what i gets from j.
        load: ``[W]``, of lookups.
        used: ``[W]``, of memory.
        energy: ``[1]``, of all links, see :func:`high_power`; kept up to date by :func:`turn`
            alone.
    """

    link: Floats
    load: Floats
    used: Floats
    energy: Floats


@kernel
def high_power(x: float) -> float:
    """The 64th power: a sum of them is nearly the greatest, but each that is lower counts."""
    for _ in range(6):
        # six squarings: pow() would be most of the search
        x *= x
    return x


@kernel
def turn(partition: int, before: Shards, problem: Problem, placed: Placed, sums: Sums) -> None:
    """Move what readers get of a partition from the shards ``before`` to the present ones."""
    weight = problem.weight[partition]
    lookup = problem.lookup[partition]
    link = sums.link
    for reader in range(len(sums.load)):
        old = before[reader]
        new = placed.source[partition, reader]
        if old == new:
            continue
        # a shard that reads from itself pays on the diagonal, which no goal looks at
        if old != reader:
            sums.energy[0] -= high_power(link[reader, old])
        if new != reader:
            sums.energy[0] -= high_power(link[reader, new])
        link[reader, old] -= weight * problem.cost[reader, old]
        link[reader, new] += weight * problem.cost[reader, new]
        if old != reader:
            sums.energy[0] += high_power(link[reader, old])
        if new != reader:
            sums.energy[0] += high_power(link[reader, new])
        sums.load[old] -= lookup
        sums.load[new] += lookup


@kernel
def sum_up(problem: Problem, placed: Placed, sums: Sums) -> None:
    """Work links, loads and memory out anew, of all partitions."""
    # anew: additions and subtractions of changes leave rounding errors behind
    sums.link[:] = 0.0
    sums.load[:] = 0.0
    sums.used[:] = 0.0
    for partition in range(len(placed.home)):
        weight = problem.weight[partition]
        lookup = problem.lookup[partition]
        for reader in range(len(sums.used)):
            shard = placed.source[partition, reader]
            sums.link[reader, shard] += weight * problem.cost[reader, shard]
            sums.load[shard] += lookup
            sums.used[reader] += problem.memory[partition] * placed.held[partition, reader]


@kernel
def empty_placed(num_partitions: int, num_shards: int) -> Placed:
    """Room for a placement."""
    shape = (num_partitions, num_shards)
    return Placed(
        np.empty(num_partitions, np.int64), np.empty(shape, np.bool_), np.empty(shape, np.int16)
    )


@kernel
def random(state: NDArray[np.uint64], below: int) -> int:
    """A whole number from 0 to ``below - 1`` (xorshift)."""
    x = state[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    # the state never becomes zero, at which xorshift would stay
    state[0] = x
    return int(np.int64((x >> np.uint64(11)) % np.uint64(below)))
