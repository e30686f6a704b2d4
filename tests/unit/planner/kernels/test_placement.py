import os

import numpy as np
import pytest

from pibroch.planner.kernels.placement import heap as heaps
from pibroch.planner.kernels.placement import naive, numba, search, state

TRIALS = 150 if os.environ.get("NUMBA_DISABLE_JIT") == "1" else 3000


def case(seed, num_partitions=40, num_shards=4, hosts=2, whole=True):
    rng = np.random.default_rng(seed)
    weight = rng.permutation(1000.0 / np.arange(1, num_partitions + 1)).round(0 if whole else 9)
    memory = rng.integers(1, 4, num_partitions).astype(float)
    host = np.arange(num_shards) * hosts // num_shards
    cost = np.where(host[:, None] == host, 1.0, 3.0)
    np.fill_diagonal(cost, 0.0)
    return weight, memory, cost, np.argsort(-weight / memory, kind="stable")


def place(weight, memory, order, room, by_memory=None):
    num_shards = len(room)
    load = np.zeros(num_shards)
    used = np.zeros(num_shards)
    home = np.zeros(len(weight), np.int64)
    by_memory = np.zeros(len(weight), bool) if by_memory is None else by_memory
    misfits = numba.place(order, weight, memory, by_memory, room, load, used, home)
    np.testing.assert_allclose(used, [memory[home == shard].sum() for shard in range(num_shards)])
    np.testing.assert_allclose(load, [weight[home == shard].sum() for shard in range(num_shards)])
    return home, load, used, misfits


def replicate(weight, memory, cost, order, home, room):
    num_shards = len(cost)
    held = np.zeros((len(home), num_shards), bool)
    held[np.arange(len(home)), home] = True
    source = np.repeat(home[:, None].astype(np.int16), num_shards, axis=1)
    link = (
        np.array([np.bincount(source[:, i], weight, num_shards) for i in range(num_shards)]) * cost
    )
    available = room - memory @ held
    nearer = numba.nearer_shards(cost)
    added = numba.replicate(
        order, weight, memory, home, cost, nearer, available, held, source, link
    )
    assert added == held.sum() - len(home)
    np.testing.assert_allclose(available, room - memory @ held)
    expected = (
        np.array([np.bincount(source[:, i], weight, num_shards) for i in range(num_shards)]) * cost
    )
    np.testing.assert_allclose(link, expected, atol=1e-6)
    return held, source, link


def test_loads_and_memory_are_balanced():
    weight, memory, _, order = case(0, 400)
    by_memory = np.arange(400) > 150
    ranks = np.empty(400, int)
    ranks[order] = np.arange(400)
    _, load, used, misfits = place(weight, memory, order, np.full(4, 1e9), by_memory[ranks])
    assert misfits == 0
    assert load.min() > 0.95 * load.max() and used.min() > 0.97 * used.max()


def test_room_is_kept_while_it_can_be_and_misfits_are_counted():
    weight, memory, _, order = case(1)
    room = np.array([memory.sum() * share for share in (0.5, 0.3, 0.15, 0.15)])
    _, _, used, misfits = place(weight, memory, order, room)
    assert misfits == 0 and (used <= room).all()
    assert place(weight, memory, order, room / 2)[3] > 0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("hosts", [1, 2, None])
def test_algorithm_1_with_and_without_bookkeeping(seed, hosts):
    weight, memory, cost, order = case(seed, hosts=hosts or 1)
    if hosts is None:  # no two links cost the same
        cost *= np.random.default_rng(seed).permutation(16).reshape(4, 4) + 2.0
    home = place(weight, memory, order, np.full(4, 1e9))[0]
    room = np.full(4, memory.sum() * [0.26, 0.35, 0.5][seed % 3] + 2)
    held, source, _ = replicate(weight, memory, cost, order, home, room)
    expected = naive.replicate(
        order, weight, memory, home, cost, room - np.bincount(home, memory, 4)
    )
    assert held.tolist() == expected[0].tolist()
    assert source.tolist() == expected[1].tolist()


def test_a_heap_has_the_greatest_on_top_whatever_changes():
    rng = np.random.default_rng(0)
    heap = np.empty(9, np.int16)
    place = np.full(9, -1, np.int16)
    key = rng.random(9)
    size = 0
    for shard in range(9):
        size = heaps.push(heap, size, place, key, shard)
    for _ in range(200):
        shard = rng.integers(9)
        key[shard] = rng.integers(5)
        heaps.rise(heap, place, key, shard)
        heaps.sink(heap, size, place, key, shard)
        assert heap[place].tolist() == list(range(9))
        assert heap[0] == key.argmax()
    tops = []
    while size:
        tops.append(int(heap[0]))
        size = heaps.drop_top(heap, size, place, key)
    assert tops == np.argsort(-key, kind="stable").tolist() and (place == -1).all()


def test_all_memory_makes_everything_local():
    weight, memory, cost, order = case(3)
    home = place(weight, memory, order, np.full(4, 1e9))[0]
    held, source, link = replicate(weight, memory, cost, order, home, np.full(4, memory.sum()))
    assert held[weight > 0].all() and abs(link).max() < 1e-6
    assert (source == np.arange(4)).all()


@pytest.mark.parametrize("may_copy", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(3))
def test_search_keeps_the_rules_and_never_ends_worse(seed, temperature, may_copy):
    weight, memory, cost, order = case(seed, 50, whole=False)
    home = place(weight, memory, order, np.full(4, 1e9))[0]
    room = np.full(4, memory.sum() * 0.35)
    if may_copy:
        held, source, link = replicate(weight, memory, cost, order, home, room)
    else:
        held, source, link = replicate(
            weight, memory, cost, order, home, np.bincount(home, memory, 4)
        )
    before = link[~np.eye(4, dtype=bool)].max()
    place_of = np.empty_like(order)
    place_of[order] = np.arange(50)
    placed = search.Placed(home.copy(), held.copy(), source.copy())
    nearer = numba.nearer_shards(cost)
    problem = state.Problem(order, place_of, weight, weight, memory, cost, nearer, room)
    worst = search.improve(problem, placed, TRIALS, temperature, 0.0, may_copy, seed)
    assert worst <= before * (1 + 1e-9)
    assert (memory @ placed.held <= room + 1e-9).all()
    partitions = np.arange(50)
    assert placed.held[partitions, placed.home].all()
    for reader in range(4):
        assert placed.held[partitions, placed.source[:, reader]].all()
        assert (placed.source[placed.held[:, reader], reader] == reader).all()
    after = np.array([np.bincount(placed.source[:, i], weight, 4) for i in range(4)]) * cost
    assert after[~np.eye(4, dtype=bool)].max() == pytest.approx(worst)
    if not may_copy:
        assert (placed.held.sum(axis=1) == 1).all()


def test_search_has_nothing_to_do_on_one_shard_or_without_reads():
    one = search.Placed(np.zeros(3, np.int64), np.ones((3, 1), bool), np.zeros((3, 1), np.int16))
    ids = np.arange(3)
    cost = np.zeros((1, 1))
    problem = state.Problem(
        ids,
        ids,
        np.ones(3),
        np.ones(3),
        np.ones(3),
        cost,
        numba.nearer_shards(cost),
        np.full(1, 9.0),
    )
    assert search.improve(problem, one, 10, 0.0, 0.5, True, 0) == 0.0
