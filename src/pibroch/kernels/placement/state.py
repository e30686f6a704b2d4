"""A placement under search, and the sums that follow from it. P partitions, W shards."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.policy import kernel

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class Problem(NamedTuple):
    """What a search may not change.

    Attributes:
        order: int64 ``[P]``, partitions by falling bytes read a byte of memory.
        place_of: int64 ``[P]``, the inverse of ``order``.
        weight: ``[P]``, bytes that one reader gets of a partition in a step.
        lookup: ``[P]``, bytes that are looked up for one reader in a step.
        memory: ``[P]``, bytes of a copy.
        cost: ``[W, W]`` of a byte that row i reads from column j.
        room: ``[W]``, bytes that each shard may hold.
    """

    order: Ints
    place_of: Ints
    weight: Floats
    lookup: Floats
    memory: Floats
    cost: Floats
    room: Floats


class Placed(NamedTuple):
    """A placement: ``home`` ``[P]``, ``held`` ``[P, W]``, ``source`` ``[P, W]`` as in ``replicate``."""

    home: Ints
    held: Flags
    source: Ints


class Sums(NamedTuple):
    """What follows from a placement: ``link`` ``[W, W]``, ``load`` ``[W]`` of lookups, ``used`` ``[W]`` of memory."""

    link: Floats
    load: Floats
    used: Floats


@kernel
def add(partition: int, sign: float, problem: Problem, placed: Placed, sums: Sums) -> None:
    """Add what a partition contributes to links and loads, ``sign`` times."""
    weight, lookup = sign * problem.weight[partition], sign * problem.lookup[partition]
    for reader in range(len(sums.load)):
        # a shard that reads from itself pays on the diagonal, which no goal looks at
        shard = placed.source[partition, reader]
        sums.link[reader, shard] += weight * problem.cost[reader, shard]
        sums.load[shard] += lookup


@kernel
def sum_up(problem: Problem, placed: Placed, sums: Sums) -> None:
    """Work the sums out anew, of all partitions."""
    # anew: additions and subtractions of changes leave rounding errors behind
    sums.link[:], sums.load[:], sums.used[:] = 0.0, 0.0, 0.0
    for partition in range(len(placed.home)):
        add(partition, 1.0, problem, placed, sums)
        for shard in range(len(sums.used)):
            sums.used[shard] += problem.memory[partition] * placed.held[partition, shard]


@kernel
def empty_placed(num_partitions: int, num_shards: int) -> Placed:
    """Room for a placement."""
    shape = (num_partitions, num_shards)
    return Placed(
        np.empty(num_partitions, np.int64), np.empty(shape, np.bool_), np.empty(shape, np.int64)
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
