"""Search from a placement to a better one: lower the worst link, keep the shards' loads level.

P partitions, W shards.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pibroch.kernels.policy import kernel
from pibroch.planner.kernels.placement.changes import (
    MOST_TOUCHED,
    MOVE,
    REDIRECT,
    change,
    choose_link,
    choose_pair,
    take_back,
    worst_link,
    worst_of,
)
from pibroch.planner.kernels.placement.numba import Flags, Floats, Ints
from pibroch.planner.kernels.placement.state import (
    Placed,
    Problem,
    Sums,
    empty_placed,
    high_power,
    random,
    sum_up,
)


class Best(NamedTuple):
    """The best placement so far, and what differs from it now.

    Attributes:
        placed: the placement.
        is_changed: ``[P]``, partitions that may lie elsewhere now.
        changed: their numbers, the first of ``[P]``.
        num_changed: int64 ``[1]``.
    """

    placed: Placed
    is_changed: Flags
    changed: Ints
    num_changed: Ints


@kernel
def _energy_of_links(link: Floats) -> float:
    num_shards = len(link)
    total = 0.0
    for i in range(num_shards):
        for j in range(num_shards):
            if i != j:
                total += high_power(link[i, j])
    return total


@kernel
def _energy(sums: Sums, load_scale: float) -> float:
    """Sum of 64th powers of links, and of loads beside their mean."""
    total = float(sums.energy[0])
    for load in sums.load:
        total += high_power(load * load_scale)
    return total


@kernel
def _worst_of_readers(link: Floats) -> Ints:
    out = np.empty(len(link), np.int64)
    for reader in range(len(link)):
        out[reader] = worst_of(link, reader)
    return out


@kernel
def _cost_of_worst(link: Floats, worst: Ints) -> float:
    number = worst_link(link, worst)
    return float(link[number // len(link), number % len(link)])


@kernel
def _note_worst(touched: Ints, old: Placed, placed: Placed, link: Floats, worst: Ints) -> None:
    """Find the worst links anew of the readers that a change has turned."""
    for reader in range(len(link)):
        is_turned = False
        for number in range(len(touched)):
            is_turned |= placed.source[touched[number], reader] != old.source[number, reader]
        if is_turned:
            worst[reader] = worst_of(link, reader)


@kernel
def _scaled(problem: Problem, scale: float) -> Problem:
    """With costs by which the worst link is 1, so that its powers stay within reach."""
    cost = problem.cost / scale
    return Problem(
        problem.order,
        problem.place_of,
        problem.weight,
        problem.lookup,
        problem.memory,
        cost,
        problem.nearer,
        problem.room,
    )


@kernel
def _begin(placed: Placed) -> Best:
    """Take the placement of now for the best one."""
    num_partitions = len(placed.home)
    copy = Placed(placed.home.copy(), placed.held.copy(), placed.source.copy())
    is_changed = np.zeros(num_partitions, np.bool_)
    changed = np.empty(num_partitions, np.int64)
    return Best(copy, is_changed, changed, np.zeros(1, np.int64))


@kernel
def _note(touched: Ints, best: Best) -> None:
    """Partitions that are no longer where the best placement has them."""
    for one in touched:
        if not best.is_changed[one]:
            best.is_changed[one] = True
            best.changed[best.num_changed[0]] = one
            best.num_changed[0] += 1


@kernel
def _save(placed: Placed, best: Best) -> None:
    """Make the current placement the best one; copies only the partitions that were noted."""
    for one in best.changed[: best.num_changed[0]]:
        best.placed.home[one] = placed.home[one]
        best.placed.held[one] = placed.held[one]
        best.placed.source[one] = placed.source[one]
        best.is_changed[one] = False
    best.num_changed[0] = 0


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
    """Try random changes to partitions of the worst link, and keep those that help.

    At first some that harm are kept, too. Returns the cost of the worst link.

    Args:
        problem: what is to be placed.
        placed: where to begin; the best placement found, on return.
        num_trials: to make.
        temperature: share by which a change may worsen the goal, falling to none in the course of
            the search.
        load_share: how much the most loaded shard counts beside the worst link; 0 for not at all.
        may_copy: whether copies may be added, dropped and exchanged; else only homes of partitions
            without copies move.
        seed: of the draws.
    """
    num_shards = placed.held.shape[1]
    if num_shards < 2:
        return 0.0
    sums = Sums(
        np.zeros((num_shards, num_shards)), np.zeros(num_shards), np.zeros(num_shards), np.zeros(1)
    )
    sum_up(problem, placed, sums)
    worst = _worst_of_readers(sums.link)
    first = _cost_of_worst(sums.link, worst)
    if first <= 0:
        return first
    problem = _scaled(problem, first)
    sum_up(problem, placed, sums)
    sums.energy[0] = exact_energy = _energy_of_links(sums.link)
    load_scale = load_share / max(1e-300, sums.load.mean())  # in units of the mean load
    energy = best_energy = _energy(sums, load_scale)
    best = _begin(placed)
    state = np.array([np.uint64(seed * 2 + 0x9E3779B97F4A7C15)], np.uint64)
    touched = np.empty(MOST_TOUCHED, np.int64)
    old = empty_placed(MOST_TOUCHED, num_shards)
    used = np.empty(num_shards)
    for trial in range(num_trials):
        link = choose_link(num_shards, worst_link(sums.link, worst), state)
        if not choose_pair(touched, link, problem, placed, state):
            continue
        kind = random(state, 5 if may_copy else 4)
        reader = link // num_shards
        num_copies = placed.held[touched[0]].sum()
        if kind == REDIRECT and num_copies == 1:  # nowhere else to read from
            continue
        if not may_copy and (kind < MOVE or num_copies > 1 or placed.held[touched[1]].sum() > 1):
            continue
        used[:] = sums.used
        count = change(kind, touched, reader, old, problem, placed, sums, state)
        if count == 0:
            continue
        after = _energy(sums, load_scale)
        bearable = 1.0  # simulated annealing: what harms is kept by chance, less and less of it
        if temperature > 0:
            bearable += 64 * temperature * (1.0 - trial / num_trials) * random(state, 1024) / 1024.0
        if after < energy * bearable:
            energy = after
            _note(touched[:count], best)
            _note_worst(touched[:count], old, placed, sums.link, worst)
            if sums.energy[0] < 1e-3 * exact_energy:
                # by differences alone what is left would drown in the rounding of what was there
                sums.energy[0] = exact_energy = _energy_of_links(sums.link)
                energy = _energy(sums, load_scale)
            # sums drift: better by rounding alone is not better; nor is a link that is worse than
            # the first
            if energy < best_energy * 0.999999 and _cost_of_worst(sums.link, worst) <= 1.0 + 1e-9:
                best_energy = energy
                _save(placed, best)
        else:
            take_back(kind, touched[:count], reader, old, problem, placed, sums)
            sums.used[:] = used
    placed.home[:] = best.placed.home
    placed.held[:] = best.placed.held
    placed.source[:] = best.placed.source
    sum_up(problem, placed, sums)
    return _cost_of_worst(sums.link, _worst_of_readers(sums.link)) * first
