"""From partitions to a placement.

Homes, copies, homes again for what was not copied, and a search at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pibroch.planner.balance import ALL, NONE, SOME, by_worth, place_homes
from pibroch.planner.cost import links, traffic
from pibroch.planner.cost import memory as used_memory
from pibroch.planner.kernels import placement
from pibroch.planner.partition import Form, Partitions
from pibroch.planner.replicate import PlacedPartitions, Policy, along_links, candidates, everywhere
from pibroch.planner.topology import ClusterTopology

Floats = NDArray[np.float64]
ROUNDS = 4
SHARD_ROUNDS = 256  # rounds times shards, about
# below it the search is thorough: greedy choices are coarse where there is little to choose from
FEW_PARTITIONS = 256
TRIALS = 100_000
TRIALS_OF_FEW = 50_000
TEMPERATURES = (0.3, 0.1)
LOAD_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class PlacementResult:
    """A placement and how good it is.

    Attributes:
        placed: of the partitions.
        worst_link: greatest cost between two shards a step.
        misfits: partitions for which there was no room.
    """

    placed: PlacedPartitions
    worst_link: float
    misfits: int


def find_placement(
    partitions: Partitions,
    form: Form,
    topology: ClusterTopology,
    room: Floats,
    policy: Policy,
    is_final: bool = True,
    room_of_homes: Floats | None = None,
) -> PlacementResult:
    """The best of several rounds, improved by a search.

    Homes are balanced first for all partitions, then, once it is known what will be copied
    everywhere (and in a second course what will be copied somewhere), for these and for the rest
    each alone. A last course copies everywhere or nowhere. Where shards are many, rounds are few,
    and begin with a guess at what will be copied everywhere. Deterministic.

    Args:
        partitions: to place.
        form: of what links carry; lookups are balanced by accesses.
        topology: W ranks.
        room: ``[W]``, bytes that each may hold.
        policy: which copies are made.
        is_final: whether to search for improvements at the end; without, it is within some per cent
            and quick.
        room_of_homes: ``[W]``, bytes that each may hold if need be for homes to lie level; ``room``
            when absent.
    """
    memory = partitions.memory_bytes
    cost = topology.cost
    weight = partitions.weight(form)
    lookup = partitions.weight("accesses")
    chosen = candidates(policy, partitions, weight, topology)
    room_of_homes = room if room_of_homes is None else room_of_homes
    rounds = _num_rounds(topology.num_ranks)

    def along(home: NDArray[np.int64]) -> PlacedPartitions:
        return along_links(home, weight, memory, cost, room)

    def on_all(home: NDArray[np.int64]) -> PlacedPartitions:
        return everywhere(home, chosen, memory, cost, room)

    nothing = np.full(len(weight), NONE)
    guess = _guess(chosen, memory, room)
    courses = [(on_all, _all_or_not, guess, rounds if policy != "none" else 1)]
    if policy == "links" and rounds == 1:
        courses.append((along, _all_or_not, guess, 1))
    elif policy == "links":
        courses.append((along, _all_or_not, nothing, rounds))
        courses.append((along, _all_some_or_none, nothing, rounds))
    best: PlacementResult | None = None
    for copied, layers, layer, num_rounds in courses:
        for _ in range(num_rounds):
            home, misfits = place_homes(
                lookup, memory, partitions.is_access_bound, room_of_homes, layer
            )
            placed = copied(home)
            result = PlacementResult(placed, _worst(weight, placed, cost), misfits)
            if best is None or (misfits, result.worst_link) < (best.misfits, best.worst_link):
                best = result
            before = layer
            layer = layers(placed)
            if np.array_equal(before, layer):
                break
    assert best is not None, "at least one round was made"
    if not is_final:
        return best
    return _improved(best, partitions, form, cost, room, policy)


def _num_rounds(num_shards: int) -> int:
    """Of placing and of searching: one takes long where shards are many."""
    return max(1, min(ROUNDS, SHARD_ROUNDS // num_shards))


def _guess(chosen: NDArray[np.int64], memory: Floats, room: Floats) -> NDArray[np.int64]:
    """Layers of partitions, as if the most worthy ones were copied everywhere."""
    layer = np.full(len(memory), NONE)
    spare = (room.sum() - memory.sum()) / max(1, len(room) - 1)
    layer[chosen[np.cumsum(memory[chosen]) <= spare]] = ALL
    return layer


def _all_or_not(placed: PlacedPartitions) -> NDArray[np.int64]:
    return np.where(placed.held.all(axis=1), ALL, NONE)


def _all_some_or_none(placed: PlacedPartitions) -> NDArray[np.int64]:
    return np.where(placed.held.all(axis=1), ALL, np.where(placed.held.sum(axis=1) > 1, SOME, NONE))


def _worst(weight: Floats, placed: PlacedPartitions, cost: Floats) -> float:
    return float(links(traffic(weight, placed.source, len(cost)) * cost).max(initial=0.0))


def _improved(
    result: PlacementResult,
    partitions: Partitions,
    form: Form,
    cost: Floats,
    room: Floats,
    policy: Policy,
) -> PlacementResult:
    weight = partitions.weight(form)
    lookup = partitions.weight("accesses")
    memory = partitions.memory_bytes
    order = by_worth(weight, memory)
    place_of = np.empty_like(order)
    place_of[order] = np.arange(len(order))
    room = np.maximum(room, used_memory(memory, result.placed.held))
    nearer = placement.nearer_shards(cost)
    problem = placement.Problem(order, place_of, weight, lookup, memory, cost, nearer, room)
    best = result
    is_small = len(weight) <= FEW_PARTITIONS
    num_trials = TRIALS_OF_FEW if is_small else TRIALS

    def run(temperature: float, seed: int) -> tuple[placement.Placed, float]:
        start = placement.Placed(
            result.placed.home.copy(), result.placed.held.copy(), result.placed.source.copy()
        )
        share = 0.0 if is_small else LOAD_SHARE
        return start, placement.improve(
            problem, start, num_trials, temperature, share, policy == "links", seed
        )

    # hill climbing ends in the nearest hollow: other draws find another, more trials do not
    temperatures = TEMPERATURES if is_small else (0.0,) * _num_rounds(len(room))
    for seed, temperature in enumerate(temperatures):
        placed, worst = run(temperature, seed)
        if worst < best.worst_link:
            best = PlacementResult(PlacedPartitions(*placed), worst, result.misfits)
    return best
