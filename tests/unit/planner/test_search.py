import numpy as np
import pytest
from benchmarks.planner_optimum import optimum

from pibroch.planner import cost as costs
from pibroch.planner.bound import Case, dual_bound, lower_bound
from pibroch.planner.make import PlanOptions, make_plan
from pibroch.planner.partition import Partitioner
from pibroch.planner.search import find_placement
from pibroch.planner.topology import ClusterTopology
from planner_cases import few_rows, random_case


def check(partitions, result, topology, room):
    placed = result.placed
    memory = partitions.memory_bytes
    assert result.misfits == 0
    assert (costs.memory(memory, placed.held) <= room * (1 + 1e-9)).all()
    rows = np.arange(len(partitions))
    for reader in range(topology.num_ranks):
        assert placed.held[rows, placed.source[:, reader]].all()


@pytest.mark.parametrize("seed", [0, 4, 6, 22, 29])
def test_worst_link_is_within_a_hundredth_of_the_bound(seed):
    tables, profile, topology, extra = random_case(seed)
    options = PlanOptions(extra, objective="accesses", steps=False)
    _, prediction = make_plan(tables, profile, topology, options)
    room = np.array(prediction.room_bytes)
    assert (
        np.array(prediction.memory_bytes)
        <= room * (1 + 2 * prediction.threshold * topology.num_ranks)
    ).all()
    partitioner = Partitioner(tables, profile)
    rows = partitioner.cut(0.0)
    bound = lower_bound(Case(rows.weight("accesses"), rows.memory_bytes, topology.cost, room))
    assert bound * (1 - 1e-6) <= costs.links(np.array(prediction.link_cost)).max() <= 1.01 * bound


@pytest.mark.parametrize("seed, num_items", [(0, 8), (1, 9), (2, 10)])
def test_few_rows_against_the_optimum(seed, num_items):
    rng = np.random.default_rng(seed)
    topology = ClusterTopology.uniform(3)
    weight = rng.integers(1, 50, num_items).astype(float)
    memory = np.ones(num_items)
    case = Case(weight, memory, topology.cost, np.full(3, np.ceil(num_items / 3) + 1))
    best = optimum(case, 20.0)
    assert best.held is not None and (memory @ best.held <= case.room).all()
    assert lower_bound(case) <= best.worst_link * (1 + 1e-6)


@pytest.mark.parametrize("seed", [2, 5])
def test_few_rows_are_searched_thoroughly(seed):
    """HiGHS needs up to a minute for these.

    Its optimum is no less than the bound, which these cases nearly reach.
    """
    partitions, topology, room = few_rows(seed)
    result = find_placement(partitions, "accesses", topology, room, "links")
    check(partitions, result, topology, room)
    bound = lower_bound(
        Case(partitions.weight("accesses"), partitions.memory_bytes, topology.cost, room)
    )
    assert bound <= result.worst_link <= 1.05 * bound


def test_any_prices_give_a_bound():
    rng = np.random.default_rng(0)
    case = Case(rng.random(9) * 9, np.ones(9), 1.0 - np.eye(3), np.full(3, 4.0))
    least = optimum(case, 20.0).worst_link
    for _ in range(50):
        prices = rng.random((3, 3)) * ~np.eye(3, dtype=bool)
        assert dual_bound(case, prices / prices.sum(), rng.random(3)) <= least + 1e-6


def test_uniform_links_without_room_for_copies_carry_the_mean_at_least():
    weight = np.full(12, 5.0)
    case = Case(weight, np.ones(12), 1.0 - np.eye(4), np.full(4, 3.0))
    assert lower_bound(case) == pytest.approx(15.0)
    assert optimum(case, 20.0).worst_link == pytest.approx(15.0)


def test_homes_alone_move_where_nothing_may_be_copied():
    tables, profile, topology, _ = random_case(3)
    partitions = Partitioner(tables, profile).cut(1e-3)
    room = np.full(topology.num_ranks, partitions.memory_bytes.sum() * 1.2 / topology.num_ranks)
    placed = find_placement(partitions, "transfers", topology, room, "none").placed
    assert not placed.copies.any()
