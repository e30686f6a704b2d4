"""Samples go where their rows are: fewer vectors cross, by the plans of lookahead's oracle."""

import numpy as np
import pytest
import torch
from benchmarks.assigned_rows import count, layout_of
from benchmarks.workloads import Workload, criteo_batches, drawn_batches, sample_path

import pibroch as pb
from pibroch.assignment import RowAssigner, RowsOf, Schedule, Verdict
from pibroch.assignment.schedule import RESTART_EVERY
from pibroch.data import Loader, LoaderPosition, Split
from pibroch.embedding import group_tables
from pibroch.errors import ProtocolError
from pibroch.exchange.assigned import rows_under
from pibroch.exchange.layout import lay_out


@pytest.mark.parametrize("seed", range(30))
def test_never_more_crosses_than_with_samples_as_they_are_given(seed):
    rng = np.random.default_rng(seed)
    num_ranks = int(rng.integers(2, 6))
    num_rows = int(rng.choice([8, 60, 1000]))
    shape = rng.integers(1, 12), rng.integers(1, 9), rng.integers(1, 130)
    ids = (rng.random(shape) ** rng.choice([1, 3, 8]) * num_rows).astype(np.int64)
    if seed % 3 == 0:  # features that go together
        ids[:, 1:] = ids[:, :1]
    assert count(ids, num_rows, num_ranks, int(rng.integers(1, 9))).ratio <= 1.0


def test_samples_stay_where_they_came_unless_that_spares_something():
    layout = layout_of(2, 40, 3)
    assigner = RowAssigner(rows_under([layout], 3, horizon=5))
    rng = np.random.default_rng(0)
    bounds = [0, 2, 5, 8]
    given = np.repeat(np.arange(3), np.diff(bounds))
    num_moved = 0
    for _ in range(200):
        verdict = assigner.assign(one_hot(rng.integers(0, 40, (2, 8)), layout.features), bounds)
        is_spared = verdict.transfers < verdict.transfers_given
        assert is_spared or np.array_equal(verdict.ranks, given)
        assert np.array_equal(np.bincount(verdict.ranks), np.diff(bounds))
        num_moved += is_spared
    assert 20 < num_moved < 200


def test_after_a_restart_all_rows_are_at_home():
    layout = layout_of(2, 40, 3)
    rows = rows_under([layout], 3, horizon=9)
    used, fresh = RowAssigner(rows), RowAssigner(rows)
    rng = np.random.default_rng(0)
    batches = [one_hot(rng.integers(0, 40, (2, 30)), layout.features) for _ in range(4)]
    for batch in batches:
        last = used.assign(batch, [0, 10, 20, 30])
    used.restart()
    again, first = (each.assign(batches[-1], [0, 10, 20, 30]) for each in (used, fresh))
    assert again[1:] == first[1:] != last[1:]
    assert np.array_equal(again.ranks, first.ranks)


@pytest.mark.skipif(sample_path() is None, reason="no Criteo sample at hand")
@pytest.mark.parametrize(("num_ranks", "bar"), [(2, 0.62), (4, 0.56), (8, 0.55)])
def test_of_real_ids_nearly_half_need_not_cross(num_ranks, bar):
    batches = criteo_batches(Workload("criteo", 33, 4096))
    counted = count(batches.ids, 100_000, num_ranks)
    assert counted.ratio <= bar
    expected, given = counted.expected[1], counted.expected[0]
    assert abs(expected / given - counted.ratio) < 0.1  # what is reported


def test_of_ids_that_nothing_connects_some_need_not_cross():
    batches = drawn_batches(Workload("zipf", 32, 4096))
    assert count(batches.ids, 100_000, 2).ratio <= 0.87


def one_hot(ids_FB, keys):
    ids = torch.tensor(ids_FB)
    return pb.JaggedBatch.from_one_hot(
        torch.empty(ids.shape[1], 0), keys, ids, torch.zeros(ids.shape[1])
    )


def test_long_bags_count_by_their_distinct_rows():
    """A bag of one row a hundred times weighs less than two rows."""
    layout = layout_of(1, 8, 2)  # even rows on rank 0
    assigner = RowAssigner(rows_under([layout], 2, horizon=0))
    bags = [[0] * 100 + [1, 3], [1] * 100 + [0, 2]]
    values = torch.tensor([row for bag in bags for row in bag])
    offsets = torch.tensor([0, 102, 204])
    batch = pb.JaggedBatch(torch.empty(2, 0), ("C0",), values, offsets, torch.zeros(2))
    assert assigner.assign(batch, [0, 1, 2]).ranks.tolist() == [1, 0]


def test_rows_that_every_rank_has_count_for_nothing():
    tables = [pb.Table("a", 4, 8), pb.Table("b", 4, 8)]
    plan = pb.Plan.of(tables, 2, {"a": "replicated", "b": "row_wise"})
    (group,) = group_tables(tables, pb.SGD(lr=0.1))
    rows = rows_under(lay_out(group.space, plan, 0), 2, horizon=0)
    verdict = RowAssigner(rows).assign(one_hot([[0, 1, 2, 3], [1, 1, 0, 0]], "ab"), [0, 2, 4])
    assert verdict.ranks.tolist() == [1, 1, 0, 0]
    assert verdict.transfers == 0 and verdict.transfers_given == 4


def test_between_hosts_a_row_costs_more():
    """Row 0 is on rank 0, whose host has rank 1 as well."""
    layout = layout_of(2, 8, 4)
    rows = rows_under([layout], 4, 0, (0, 0, 1, 1))
    ids = [[0, 0, 5, 5], [4, 4, 2, 3]]
    verdict = RowAssigner(rows).assign(one_hot(ids, layout.features), [0, 1, 2, 3, 4])
    assert sorted(verdict.ranks[:2].tolist()) == [0, 1]
    assert sorted(verdict.ranks[2:].tolist()) == [2, 3]
    assert rows.price.tolist()[0] == [0, 1, 8, 8]


def test_what_another_process_is_sent_says_the_same():
    layout = layout_of(3, 50, 3)
    rows = rows_under([layout], 3, 7)
    other = RowsOf.of_described(rows.described())
    rng = np.random.default_rng(0)
    assigners = RowAssigner(rows), RowAssigner(other)
    for _ in range(4):
        batch = one_hot(rng.integers(0, 50, (3, 31)), layout.features)
        ours, theirs = (each.assign(batch, [0, 10, 20, 31]) for each in assigners)
        assert np.array_equal(ours.ranks, theirs.ranks) and ours[1:] == theirs[1:]
    few_addresses = '[[[["a"],[5],[2],[[0]],[0,5],0,4]],2,0,[]]'
    for text in ("", "[]", "[[[[],[],[],[],[0],0,4]],2,0,[]]", few_addresses):
        with pytest.raises(ProtocolError):
            RowsOf.of_described(text)


class Counting:
    """An assigner that writes down what it is asked."""

    def __init__(self):
        self.seen = []

    def restart(self):
        self.seen.append("restart")

    def assign(self, batch, bounds):
        self.seen.append(int(batch.values[0]))
        return Verdict(np.zeros(batch.batch_size, np.int16), 0, 0)


def schedule_of(num_samples, batch_size):
    ids = np.arange(num_samples, dtype=np.int32)[:, None]
    labels = np.zeros(num_samples, np.uint8)
    split = Split("train", ("a",), (), labels, np.empty((num_samples, 0), np.float32), ids, {})
    assigner = Counting()
    return Schedule(Loader(split, batch_size), assigner), assigner.seen


def test_a_schedule_begins_anew_at_fixed_positions():
    num_batches = 2 * RESTART_EVERY + 3
    schedule, seen = schedule_of(2 * num_batches - 1, 2)
    for epoch in range(2):
        for number in range(num_batches):
            schedule.verdict(LoaderPosition(epoch, 2 * number))
    of_epoch = [2 * number for number in range(num_batches)]
    for at in (2 * RESTART_EVERY, RESTART_EVERY, 0):
        of_epoch.insert(at, "restart")
    assert seen == of_epoch * 2


def test_a_schedule_looks_again_at_what_came_before():
    schedule, seen = schedule_of(1000, 2)
    schedule.verdict(LoaderPosition(0, 2 * (RESTART_EVERY + 2)))
    first = 2 * RESTART_EVERY
    assert seen == ["restart", first, first + 2, first + 4]
    schedule.verdict(LoaderPosition(0, first + 8))  # goes on
    schedule.verdict(LoaderPosition(0, first + 4))  # is kept
    assert seen[4:] == [first + 6, first + 8]
    schedule.verdict(LoaderPosition(0, 2))  # goes back
    assert seen[6:] == ["restart", 0, 2]
    schedule.verdict(LoaderPosition(0, 5))  # of a run with other batches before
    assert seen[9:] == ["restart", 1, 3, 5]


def test_a_schedule_of_another_epoch_begins_anew():
    schedule, seen = schedule_of(1000, 2)
    schedule.verdict(LoaderPosition(0, 4))
    assert seen == ["restart", 0, 2, 4]
    schedule.verdict(LoaderPosition(1, 6))
    assert seen[4:] == ["restart", 0, 2, 4, 6], "as a run that begins there"
