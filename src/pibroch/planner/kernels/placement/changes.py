"""Changes that a search tries: a copy, a move of a home, a swap of two, or another source."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.policy import kernel
from pibroch.planner.kernels.placement.numba import Floats, Ints
from pibroch.planner.kernels.placement.state import Placed, Problem, Sums, random, turn

NEIGHBOURS = 64  # partitions on either side, in order, that one is exchanged with
ATTEMPTS = 32  # to find a partition that crosses the worst link
MOST_TOUCHED = 6  # partitions by one change
# kinds of changes; 1 is a copy, too
COPY = 0
MOVE = 2
SWAP = 3
REDIRECT = 4


@kernel
def worst_of(link: Floats, reader: int) -> int:
    """The shard from which a reader gets at the greatest cost."""
    worst = -1
    for shard in range(len(link)):
        if shard != reader and (worst < 0 or link[reader, shard] > link[reader, worst]):
            worst = shard
    return worst


@kernel
def worst_link(link: Floats, worst: Ints) -> int:
    """The number of the link that costs most, W times its reader plus its shard.

    ``worst`` ``[W]`` is each reader's.
    """
    busiest = 0
    for reader in range(1, len(link)):
        if link[reader, worst[reader]] > link[busiest, worst[busiest]]:
            busiest = reader
    return int(busiest * len(link) + worst[busiest])


@kernel
def choose_link(num_shards: int, worst: int, state: NDArray[np.uint64]) -> int:
    """Mostly the worst link, now and then any."""
    if random(state, 4) > 0:
        return worst
    reader = random(state, num_shards)
    return int(reader * num_shards + (reader + 1 + random(state, num_shards - 1)) % num_shards)


@kernel
def choose_pair(
    touched: Ints, link: int, problem: Problem, placed: Placed, state: NDArray[np.uint64]
) -> bool:
    """A partition that crosses a link, and another: like it, or any; whether they were found."""
    num_partitions, num_shards = placed.held.shape
    reader = link // num_shards
    shard = link % num_shards
    for _ in range(ATTEMPTS):
        p = problem.order[random(state, num_partitions)]
        if placed.source[p, reader] == shard and problem.weight[p] > 0:
            place = random(state, num_partitions)
            # half of the time one of like worth: others would seldom make a good exchange
            if random(state, 2) == 0:
                near = problem.place_of[p] + random(state, 2 * NEIGHBOURS + 1) - NEIGHBOURS
                place = min(max(near, 0), num_partitions - 1)
            touched[0] = p
            touched[1] = problem.order[place]
            return bool(touched[1] != p)
    return False


@kernel
def _mend_sources(partition: int, problem: Problem, placed: Placed) -> None:
    """Lead readers to themselves, to cheaper shards, or away from those without the partition."""
    home = placed.home[partition]
    cost = problem.cost
    nearer = problem.nearer
    for reader in range(len(cost)):
        best = placed.source[partition, reader]
        if placed.held[partition, reader]:
            best = reader
        else:
            if not placed.held[partition, best]:
                best = home
            for shard in nearer.shards[nearer.starts[reader] : nearer.starts[reader + 1]]:
                if placed.held[partition, shard]:
                    if cost[reader, shard] < cost[reader, best]:
                        best = shard
                    break
        placed.source[partition, reader] = best


@kernel
def _redirect(partition: int, reader: int, start: int, placed: Placed) -> None:
    """Let a reader turn to the next other holder from ``start`` on, whatever it costs."""
    num_shards = placed.held.shape[1]
    for step in range(num_shards):
        shard = (start + step) % num_shards
        if (
            shard != reader
            and placed.held[partition, shard]
            and shard != placed.source[partition, reader]
        ):
            placed.source[partition, reader] = shard
            return


@kernel
def _copy(
    touched: Ints,
    shard: int,
    problem: Problem,
    placed: Placed,
    sums: Sums,
    state: NDArray[np.uint64],
) -> int:
    """Give ``shard`` a copy of ``touched[0]``.

    It drops those of ``touched[1]`` and, as far as is needed, of others.

    Returns:
        The number of partitions that were touched, 0 where it was not possible.
    """
    memory = problem.memory
    room = problem.room[shard]
    p = touched[0]
    if placed.held[p, shard]:
        return 0
    count = 1
    free = room - sums.used[shard]
    candidate = touched[1]
    for _ in range(ATTEMPTS):
        if free >= memory[p]:
            break
        is_new = True
        for number in range(count):
            is_new &= touched[number] != candidate
        if is_new and placed.held[candidate, shard] and placed.home[candidate] != shard:
            if count == MOST_TOUCHED:
                return 0
            touched[count] = candidate
            count += 1
            free += memory[candidate]
        candidate = random(state, len(memory))
    if free < memory[p]:
        return 0
    for number in range(1, count):
        placed.held[touched[number], shard] = False
    placed.held[p, shard] = True
    sums.used[shard] = room - free + memory[p]
    return count


@kernel
def _move_home(p: int, shard: int, problem: Problem, placed: Placed, sums: Sums) -> int:
    """Move p's home to ``shard``, to a copy if one is there.

    Returns how many partitions were touched.
    """
    before = placed.home[p]
    size = problem.memory[p]
    if before == shard:
        return 0
    if not placed.held[p, shard]:
        if sums.used[shard] + size > problem.room[shard]:
            return 0
        placed.held[p, before] = False
        placed.held[p, shard] = True
        sums.used[before] -= size
        sums.used[shard] += size
    placed.home[p] = shard
    return 1


@kernel
def _swap_homes(p: int, q: int, problem: Problem, placed: Placed, sums: Sums) -> int:
    """Swap the homes of two partitions neither of which has a copy at the other's.

    Returns how many were touched.
    """
    a = placed.home[p]
    b = placed.home[q]
    used = sums.used
    held = placed.held
    if a == b or held[p, b] or held[q, a]:
        return 0
    more = problem.memory[q] - problem.memory[p]
    if (more > 0 and used[a] + more > problem.room[a]) or (
        more < 0 and used[b] - more > problem.room[b]
    ):
        return 0
    held[p, a] = False
    held[p, b] = True
    held[q, b] = False
    held[q, a] = True
    used[a] += more
    used[b] -= more
    placed.home[p] = b
    placed.home[q] = a
    return 2


@kernel
def change(
    kind: int,
    touched: Ints,
    reader: int,
    old: Placed,
    problem: Problem,
    placed: Placed,
    sums: Sums,
    state: NDArray[np.uint64],
) -> int:
    """Make one change, let readers follow, and note in ``old`` what was before.

    Returns:
        How many partitions it touched, 0 where it was not possible.
    """
    p = touched[0]
    q = touched[1]
    num_shards = len(sums.load)
    for number in range(2):
        one = touched[number]
        old.home[number] = placed.home[one]
        old.held[number] = placed.held[one]
    if kind == REDIRECT:
        count = 1
    elif kind < MOVE:
        count = int(_copy(touched, reader, problem, placed, sums, state))
    elif kind == MOVE:
        count = int(_move_home(p, random(state, num_shards), problem, placed, sums))
    else:
        count = int(_swap_homes(p, q, problem, placed, sums))
    for number in range(count):
        one = touched[number]
        old.source[number] = placed.source[one]
        if kind == REDIRECT:
            _redirect(one, reader, random(state, num_shards), placed)
        else:
            _mend_sources(one, problem, placed)
        turn(one, old.source[number], problem, placed, sums)
    return count


@kernel
def take_back(
    kind: int, touched: Ints, reader: int, old: Placed, problem: Problem, placed: Placed, sums: Sums
) -> None:
    """Undo a change; memory is the caller's."""
    scratch = np.empty_like(placed.source[0])
    for number in range(len(touched)):
        one = touched[number]
        scratch[:] = placed.source[one]
        placed.source[one] = old.source[number]
        turn(one, scratch, problem, placed, sums)
        if kind < MOVE:
            placed.held[one, reader] = number > 0
        elif kind != REDIRECT:
            placed.home[one] = old.home[number]
            placed.held[one] = old.held[number]
