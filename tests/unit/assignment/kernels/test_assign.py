"""Placing samples: the compiled kernels mean what the naive ones say."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pibroch.assignment.kernels import assign
from pibroch.assignment.kernels.assign import naive


def room_for(num_ids):
    numbers = [np.empty(num_ids, np.int32) for _ in range(2)]
    ranks = [np.empty(num_ids, np.int16) for _ in range(2)]
    costs = [np.empty(num_ids, np.int32) for _ in range(2)]
    places = [np.empty(num_ids, np.int64) for _ in range(2)]
    return assign.Room(*numbers, *ranks, *costs, *places, np.empty(num_ids + 1, np.int32))


def lanes_of(homes, num_ranks, weight=1, num_features=1):
    """One lane of features of one table, whose rows lie in the order of their homes.

    Shard ``num_ranks`` is nobody's.
    """
    bounds = np.searchsorted(homes, np.arange(num_ranks + 2))[None].astype(np.int64)
    one = np.ones(1, np.int64)
    return assign.Lanes(np.zeros(num_features, np.int64), one, bounds, 0 * one, weight * one)


def entered(table, now, horizon, samples, lanes, num_ranks):
    """A batch, entered: its arrays, where bags begin, its rows. Features take ids in turns."""
    num_features = len(lanes.of_feature)
    bags = [own[feature::num_features] for feature in range(num_features) for own in samples]
    ids = np.array([row for bag in bags for row in bag], np.int64)
    offsets = np.cumsum([0, *map(len, bags)])
    room = room_for(len(ids))
    num_rows = assign.enter(table, now, horizon, ids, offsets, lanes, num_ranks, room)
    return room, offsets, num_rows


@st.composite
def workloads(draw):
    """Ranks, homes of rows, batches of bags with duplicates, prices, passes, rows left aside."""
    num_ranks = draw(st.sampled_from([2, 3, 4, 5, 64]))
    homes = sorted(draw(st.lists(st.integers(0, num_ranks), min_size=1, max_size=24)))
    bags = st.lists(st.integers(0, len(homes) - 1), max_size=5)
    batches = draw(st.lists(st.lists(bags, max_size=12), min_size=1, max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    price = rng.integers(1, 5, (num_ranks, num_ranks))
    price = np.maximum(price, price.T) * (1 - np.eye(num_ranks, dtype=np.int64))
    rules = assign.Rules(
        price, draw(st.integers(0, 3)), draw(st.sampled_from([2, 4, 100])), draw(st.integers(1, 3))
    )
    numbers = [draw(st.integers(0, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))]
    return num_ranks, homes, batches, rules, *numbers


@settings(max_examples=200, deadline=None)
@given(workloads())
def test_kernels_are_the_naive_ones(workload):
    num_ranks, homes, batches, rules, horizon, weight, num_features = workload
    table = np.zeros((64, assign.LINE), np.int64)
    lanes = lanes_of(homes, num_ranks, weight, num_features)
    states = naive.NaiveStates(
        horizon, [home if home < num_ranks else naive.NOBODY for home in homes]
    )
    price = rules.price.tolist()
    for now, samples in enumerate(batches, start=1):
        states.now = now
        sizes = np.diff([len(samples) * rank // num_ranks for rank in range(num_ranks + 1)])
        room, offsets, num_rows = entered(table, now, horizon, samples, lanes, num_ranks)
        assert room.reads[:num_rows].sum() == sum(map(len, samples))
        assert num_rows == len({row for own in samples for row in own})
        rows = {row: states.row(row, weight) for own in samples for row in own}
        columns = room.where, room.fetch, room.share
        found = {
            int(room.address[n]): naive.Row(*(int(column[n]) for column in columns))
            for n in range(num_rows)
        }
        assert found == rows

        ranks = np.empty(len(samples), np.int16)
        assign.place(room, num_rows, offsets, sizes, rules, ranks)
        assert np.bincount(ranks, minlength=num_ranks).tolist() == sizes.tolist()
        assert ranks.tolist() == naive.place(samples, rows, sizes.tolist(), price, *rules[1:])

        readers = np.zeros((num_rows, 2), np.int64)
        assign.mark(room, offsets, np.stack([ranks, ranks]), readers)
        assert (readers[:, 0] == readers[:, 1]).all()
        readers = readers[:, 1]
        assert assign.count_transfers(room, readers, rules.price) == naive.count_transfers(
            samples, ranks.tolist(), rows, price
        )
        assign.settle(table, now, room, readers)
        states.settle(samples, ranks.tolist())


def test_a_full_line_loses_the_row_that_was_read_longest_ago():
    """And of several the least, so that a restart changes nothing."""
    table = np.zeros((1, assign.LINE), np.int64)
    homes = [0] * 8 + [1]
    lanes = lanes_of(homes, 2)
    one_rank = np.ones((2, 4), np.int16)

    def step(now, rows):
        samples = [[row] for row in rows]
        room, offsets, num_rows = entered(table, now, 10, samples, lanes, 2)
        readers = np.zeros((num_rows, 2), np.int64)
        assign.mark(room, offsets, one_rank[:, : len(rows)], readers)
        assign.settle(table, now, room, readers[:, 0])
        return room.where[:num_rows].tolist()

    assert step(1, [3, 1, 2]) == [0, 0, 0]
    assert step(2, [0]) == [0]
    assert step(3, [4]) == [0]  # takes the place of row 1
    assert step(4, [0, 2, 3, 4]) == [1, 1, 1, 1]
    assert step(5, [1]) == [0]


@pytest.mark.parametrize(
    ("readers", "owner"),
    [
        ([0, 1, 2], 0),  # who had it
        ([1, 2], 1),  # its home
        ([2, 3], 3),  # one by its address
        ([3, 4], 4),
        ([3], 3),
    ],
)
def test_who_has_a_row_after_a_step(readers, owner):
    """Row 1, whose home is rank 1, and which rank 0 has; the naive states say the same."""
    num_ranks = 5
    homes = [0, 1, 2, 3, 4]
    table = np.zeros((1, assign.LINE), np.int64)
    lanes = lanes_of(homes, num_ranks)
    states = naive.NaiveStates(10, homes)
    for now, ranks in enumerate(([0], readers), start=1):
        samples = [[1]] * len(ranks)
        states.now = now
        room, offsets, num_rows = entered(table, now, 10, samples, lanes, num_ranks)
        among = np.zeros((num_rows, 2), np.int64)
        assign.mark(room, offsets, np.array([ranks, ranks], np.int16), among)
        assign.settle(table, now, room, among[:, 0])
        states.settle(samples, ranks)
    room, _, _ = entered(table, 3, 10, [[1]], lanes, num_ranks)
    states.now = 3
    assert room.where[0] == owner == states.row(1).where


def test_samples_that_read_the_same_rows_come_together():
    """Two kinds of samples in turn, of which one would stay at its home."""
    samples = [[kind, 2 + kind] for kind in (0, 1) * 4]
    table = np.zeros((4, assign.LINE), np.int64)
    room, offsets, num_rows = entered(table, 1, 9, samples, lanes_of([0, 0, 0, 1], 2), 2)
    ranks = np.empty(8, np.int16)
    price = np.array([[0, 1], [1, 0]])
    assign.place(room, num_rows, offsets, np.array([4, 4]), assign.Rules(price, 2, 100, 1), ranks)
    assert len(set(ranks[::2])) == len(set(ranks[1::2])) == 1


def test_of_no_samples_nothing_is_placed():
    table = np.zeros((1, assign.LINE), np.int64)
    room, offsets, num_rows = entered(table, 1, 9, [], lanes_of([0, 1], 2), 2)
    ranks = np.empty(0, np.int16)
    price = np.array([[0, 1], [1, 0]])
    assign.place(room, num_rows, offsets, np.array([0, 0]), assign.Rules(price, 2, 100, 1), ranks)
    assert num_rows == 0
