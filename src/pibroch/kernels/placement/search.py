"""Search from a placement to a better one: lower the worst link, keep the shards' loads level. P partitions, W shards."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.policy import kernel

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

NEIGHBOURS = 64  # partitions on either side, in order, that one is exchanged with
ATTEMPTS = 32  # to find a partition that crosses the worst link
MOST_TOUCHED = 6  # partitions by one change
COPY, MOVE, SWAP, REDIRECT = 0, 2, 3, 4  # kinds of changes; 1 is a copy, too


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
def _random(state: NDArray[np.uint64], below: int) -> int:
    """A whole number from 0 to ``below - 1`` (xorshift)."""
    x = state[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    state[0] = x
    return int(np.int64((x >> np.uint64(11)) % np.uint64(below)))


@kernel
def _high_power(x: float) -> float:
    for _ in range(6):
        x *= x
    return x


@kernel
def _energy(link: Floats, load: Floats, load_scale: float) -> float:
    """Sum of 64th powers: nearly the worst link, but every lower link helps; and of loads beside their mean."""
    num_shards, total = len(link), 0.0
    for i in range(num_shards):
        for j in range(num_shards):
            if i != j:
                total += _high_power(link[i, j])
        total += _high_power(load[i] * load_scale)
    return total


@kernel
def _worst(link: Floats) -> int:
    num_shards, worst = len(link), 1
    for i in range(num_shards):
        for j in range(num_shards):
            if i != j and link[i, j] > link[worst // num_shards, worst % num_shards]:
                worst = i * num_shards + j
    return worst


@kernel
def _add(partition: int, sign: float, problem: Problem, placed: Placed, sums: Sums) -> None:
    """Add what a partition contributes to links and loads, ``sign`` times."""
    weight, lookup = sign * problem.weight[partition], sign * problem.lookup[partition]
    for reader in range(len(sums.load)):
        shard = placed.source[partition, reader]
        sums.link[reader, shard] += weight * problem.cost[reader, shard]
        sums.load[shard] += lookup


@kernel
def _sum_up(problem: Problem, placed: Placed, sums: Sums) -> None:
    sums.link[:], sums.load[:], sums.used[:] = 0.0, 0.0, 0.0
    for partition in range(len(placed.home)):
        _add(partition, 1.0, problem, placed, sums)
        for shard in range(len(sums.used)):
            sums.used[shard] += problem.memory[partition] * placed.held[partition, shard]


@kernel
def _mend_sources(partition: int, problem: Problem, placed: Placed) -> None:
    """Lead readers to themselves, or away from shards that hold the partition no longer, or to cheaper ones."""
    home, cost, num_shards = placed.home[partition], problem.cost, len(problem.cost)
    for reader in range(num_shards):
        best = placed.source[partition, reader]
        if placed.held[partition, reader]:
            best = reader
        else:
            if not placed.held[partition, best]:
                best = home
            for shard in range(num_shards):
                if placed.held[partition, shard] and cost[reader, shard] < cost[reader, best]:
                    best = shard
        placed.source[partition, reader] = best


@kernel
def _redirect(partition: int, reader: int, start: int, placed: Placed) -> None:
    """Let a reader turn to the next other holder from ``start`` on, whatever it costs."""
    num_shards = placed.held.shape[1]
    for step in range(num_shards):
        shard = (start + step) % num_shards
        if shard != reader and placed.held[partition, shard] and shard != placed.source[partition, reader]:
            placed.source[partition, reader] = shard
            return


@kernel
def _copy(touched: Ints, shard: int, problem: Problem, placed: Placed, sums: Sums, state: NDArray[np.uint64]) -> int:
    """Give ``shard`` a copy of ``touched[0]``; it drops those of ``touched[1]`` and, as far as is needed, of others.

    Returns:
        The number of partitions that were touched, 0 where it was not possible.
    """
    memory, room, p = problem.memory, problem.room[shard], touched[0]
    if placed.held[p, shard]:
        return 0
    count, free = 1, room - sums.used[shard]
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
        candidate = _random(state, len(memory))
    if free < memory[p]:
        return 0
    for number in range(1, count):
        placed.held[touched[number], shard] = False
    placed.held[p, shard] = True
    sums.used[shard] = room - free + memory[p]
    return count


@kernel
def _move_home(p: int, shard: int, problem: Problem, placed: Placed, sums: Sums) -> int:
    """Move p's home to ``shard``, to a copy if one is there; returns how many partitions were touched."""
    before, size = placed.home[p], problem.memory[p]
    if before == shard:
        return 0
    if not placed.held[p, shard]:
        if sums.used[shard] + size > problem.room[shard]:
            return 0
        placed.held[p, before], placed.held[p, shard] = False, True
        sums.used[before] -= size
        sums.used[shard] += size
    placed.home[p] = shard
    return 1


@kernel
def _swap_homes(p: int, q: int, problem: Problem, placed: Placed, sums: Sums) -> int:
    """Swap the homes of two partitions neither of which has a copy at the other's; returns how many were touched."""
    a, b, used, held = placed.home[p], placed.home[q], sums.used, placed.held
    if a == b or held[p, b] or held[q, a]:
        return 0
    more = problem.memory[q] - problem.memory[p]
    if (more > 0 and used[a] + more > problem.room[a]) or (more < 0 and used[b] - more > problem.room[b]):
        return 0
    held[p, a], held[p, b], held[q, b], held[q, a] = False, True, False, True
    used[a] += more
    used[b] -= more
    placed.home[p], placed.home[q] = b, a
    return 2


@kernel
def _choose_link(link: Floats, state: NDArray[np.uint64]) -> int:
    """Mostly the worst link, now and then any."""
    num_shards = len(link)
    if _random(state, 4) > 0:
        return int(_worst(link))
    reader = _random(state, num_shards)
    return int(reader * num_shards + (reader + 1 + _random(state, num_shards - 1)) % num_shards)


@kernel
def _choose_pair(touched: Ints, link: int, problem: Problem, placed: Placed, state: NDArray[np.uint64]) -> bool:
    """A partition that crosses a link, and another: like it, or any; whether they were found."""
    num_partitions, num_shards = placed.held.shape
    reader, shard = link // num_shards, link % num_shards
    for _ in range(ATTEMPTS):
        p = problem.order[_random(state, num_partitions)]
        if placed.source[p, reader] == shard and problem.weight[p] > 0:
            place = _random(state, num_partitions)
            if _random(state, 2) == 0:
                near = problem.place_of[p] + _random(state, 2 * NEIGHBOURS + 1) - NEIGHBOURS
                place = min(max(near, 0), num_partitions - 1)
            touched[0], touched[1] = p, problem.order[place]
            return bool(touched[1] != p)
    return False


@kernel
def _change(
    kind: int, touched: Ints, reader: int, problem: Problem, placed: Placed, sums: Sums, state: NDArray[np.uint64]
) -> int:
    """Make one change; returns how many partitions it touched, 0 where it was not possible."""
    p, q, num_shards = touched[0], touched[1], len(sums.load)
    if kind < MOVE:
        return int(_copy(touched, reader, problem, placed, sums, state))
    if kind == MOVE:
        return int(_move_home(p, _random(state, num_shards), problem, placed, sums))
    return int(_swap_homes(p, q, problem, placed, sums))


@kernel
def _take_back(
    kind: int, touched: Ints, reader: int, old: Placed, problem: Problem, placed: Placed, sums: Sums
) -> None:
    """Undo a change; memory is the caller's."""
    for number in range(len(touched)):
        one = touched[number]
        _add(one, -1.0, problem, placed, sums)
        placed.source[one] = old.source[number]
        _add(one, 1.0, problem, placed, sums)
        if kind < MOVE:
            placed.held[one, reader] = number > 0
        elif kind != REDIRECT:
            placed.home[one], placed.held[one] = old.home[number], old.held[number]


@kernel
def improve(
    problem: Problem,
    placed: Placed,
    num_trials: int,
    temperature: float,
    load_share: float,
    may_copy: bool,
    seed: int,
) -> float:
    """Try random changes to partitions of the worst link; keep those that help, at first some that harm a little.

    Args:
        problem: what is to be placed.
        placed: where to begin; the best placement found, on return.
        num_trials: to make.
        temperature: share by which a change may worsen the goal, falling to none in the course of the search.
        load_share: how much the most loaded shard counts beside the worst link; 0 for not at all.
        may_copy: whether copies may be added, dropped and exchanged; else only homes of partitions without copies move.
        seed: of the draws.

    Returns:
        The worst link.
    """
    num_partitions, num_shards = placed.held.shape
    if num_shards < 2:
        return 0.0
    sums = Sums(np.zeros((num_shards, num_shards)), np.zeros(num_shards), np.zeros(num_shards))
    _sum_up(problem, placed, sums)
    first = sums.link[_worst(sums.link) // num_shards, _worst(sums.link) % num_shards]
    if first <= 0:
        return float(first)
    cost = problem.cost / first  # so that the powers stay within reach
    problem = Problem(
        problem.order, problem.place_of, problem.weight, problem.lookup, problem.memory, cost, problem.room
    )
    _sum_up(problem, placed, sums)
    load_scale = load_share / max(1e-300, sums.load.mean())
    energy = best_energy = _energy(sums.link, sums.load, load_scale)
    best = Placed(placed.home.copy(), placed.held.copy(), placed.source.copy())
    is_unsaved, unsaved, num_unsaved = np.zeros(num_partitions, np.bool_), np.empty(num_partitions, np.int64), 0
    state = np.array([np.uint64(seed * 2 + 0x9E3779B97F4A7C15)], np.uint64)
    touched, used = np.empty(MOST_TOUCHED, np.int64), np.empty(num_shards)
    old = Placed(
        np.empty(MOST_TOUCHED, np.int64),
        np.empty((MOST_TOUCHED, num_shards), np.bool_),
        np.empty((MOST_TOUCHED, num_shards), np.int64),
    )
    for trial in range(num_trials):
        link = _choose_link(sums.link, state)
        if not _choose_pair(touched, link, problem, placed, state):
            continue
        kind = _random(state, 5 if may_copy else 4)
        reader, p, q = link // num_shards, touched[0], touched[1]
        num_copies = placed.held[p].sum()
        if not may_copy and (kind < MOVE or num_copies > 1 or placed.held[q].sum() > 1):
            continue
        used[:] = sums.used
        for number in range(2):
            one = touched[number]
            old.home[number], old.held[number] = placed.home[one], placed.held[one]
        if kind == REDIRECT:
            count = 1 if num_copies > 1 else 0
        else:
            count = _change(kind, touched, reader, problem, placed, sums, state)
        if count == 0:
            continue
        for number in range(count):
            one = touched[number]
            _add(one, -1.0, problem, placed, sums)
            old.source[number] = placed.source[one]
            if kind == REDIRECT:
                _redirect(one, reader, _random(state, num_shards), placed)
            else:
                _mend_sources(one, problem, placed)
            _add(one, 1.0, problem, placed, sums)
        after = _energy(sums.link, sums.load, load_scale)
        bearable = 1.0
        if temperature > 0:
            bearable += 64 * temperature * (1.0 - trial / num_trials) * _random(state, 1024) / 1024.0
        if after < energy * bearable:
            energy = after
            for number in range(count):
                if not is_unsaved[touched[number]]:
                    is_unsaved[touched[number]] = True
                    unsaved[num_unsaved] = touched[number]
                    num_unsaved += 1
            if energy < best_energy * 0.999999:
                best_energy = energy
                for number in range(num_unsaved):
                    one = unsaved[number]
                    best.home[one], best.held[one], best.source[one] = (
                        placed.home[one],
                        placed.held[one],
                        placed.source[one],
                    )
                    is_unsaved[one] = False
                num_unsaved = 0
            continue
        _take_back(kind, touched[:count], reader, old, problem, placed, sums)
        sums.used[:] = used
    placed.home[:], placed.held[:], placed.source[:] = best.home, best.held, best.source
    _sum_up(problem, placed, sums)
    worst = _worst(sums.link)
    return float(sums.link[worst // num_shards, worst % num_shards] * first)
