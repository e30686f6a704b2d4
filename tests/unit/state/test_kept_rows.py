"""Rows in memory that outlives a process.

Wherever it is killed, there is a step to go on from, with the rows of that step.
"""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pibroch.embedding import MemoryShard, RowWiseAdagrad, Table
from pibroch.state import kept_rows as module
from pibroch.state.kept_rows import HEAD_BYTES, KeptRows, newest_common, steps_in

ROWS = 23
DIM = 3


class Killed(BaseException):
    pass


def shard_of(seed=1, dtype="float32"):
    tables = [Table(name, rows, DIM, dtype=dtype) for name, rows in (("a", ROWS - 5), ("b", 5))]
    return MemoryShard.whole(tables, RowWiseAdagrad(lr=0.1), seed)


def memory_of(shard):
    return np.zeros(HEAD_BYTES + sum(KeptRows._sizes(*shard.records.shape)), np.uint8)


def train(shard, step):
    rng = np.random.default_rng(step)
    rows = np.unique(rng.integers(0, len(shard.records), rng.integers(0, 9)))
    shard.records[rows] = rng.standard_normal((len(rows), shard.records.shape[1]), np.float32)
    shard.mark(rows)


def states(num_steps, seed):
    shard = shard_of(seed)
    states = []
    for step in range(num_steps + 1):
        if step:
            train(shard, step)
        states.append(shard.records.copy())
    return states


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_come_back_as_they_were_at_the_cut(dtype):
    shard = shard_of(dtype=dtype)
    memory = memory_of(shard)
    kept = KeptRows(shard, memory)
    kept.begin(0)
    train(shard, 1)
    kept.cut(1)
    train(shard, 2)
    kept.cut(2)
    wanted = shard.space.copy()
    train(shard, 3)
    other = shard_of(seed=9, dtype=dtype)
    again = KeptRows(other, memory)
    assert again.steps() == {1, 2}
    again.restore(2)
    again.go_on()
    assert np.array_equal(other.space.view(np.uint32), wanted.view(np.uint32))


def test_marks_of_all_names_come_back_with_those_of_a_cut_that_may_not_have_been_saved():
    shard = shard_of()
    for name in ("cut", "other", "stays"):
        shard.start_marks(name)
    memory = memory_of(shard)
    kept = KeptRows(shard, memory)
    kept.begin(0)
    shard.mark(np.array([1, 4]))
    kept.cut(1)
    assert shard.cut("cut") is not None
    shard.mark(np.array([2]))
    shard.start_marks("other")
    kept.cut(2)
    shard.end_cut("cut", is_saved=True)
    other = shard_of()
    for name in ("stays", "other", "cut", "later"):  # in another order than before
        other.start_marks(name)
    KeptRows(other, memory).restore(2)
    assert {name: other.marks.rows(name).tolist() for name in other.marks.names} == {
        "cut": [1, 2, 4],
        "stays": [1, 2, 4],
        "other": [],
        "later": list(range(ROWS)),
    }


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 4),
    st.lists(st.integers(0, 11), min_size=1, max_size=6),
    st.integers(0, 14),
    st.integers(0, 3),
)
def test_whoever_is_killed_wherever_all_have_a_step_in_common(every, kills, late, settled):
    """Two processes that make cuts of the same steps, one of which may be behind.

    Each life ends within one of the parts.

    Between cuts some, all or none bring in their journals.
    """
    num_steps = 12
    truths = [states(num_steps, seed) for seed in (1, 2)]
    memories = [memory_of(shard_of()) for _ in truths]
    start = 0
    for life, kill_at in enumerate(kills):
        shards = [shard_of(seed) for seed in (1, 2)]
        kept = [KeptRows(shard, memory) for shard, memory in zip(shards, memories, strict=True)]
        common = newest_common(each.steps() for each in kept)
        if life == 0:
            for each in kept:
                each.begin(0)
        else:
            assert common is not None and common >= start
            start = common
            for each, shard, truth in zip(kept, shards, truths, strict=True):
                each.restore(start)
                each.go_on()
                assert np.array_equal(shard.records, truth[start])
        step = start
        parts = ["before", "bring in", "journal", "head", "settle"]
        left = kill_at
        while step < num_steps:
            step += 1
            for shard in shards:
                train(shard, step)
            if step % every:
                continue
            left -= 1
            if left >= 0:
                for each in kept:
                    each.cut(step)
                for number, each in enumerate(kept):
                    if settled >> number & 1:
                        each._settle()
                continue
            first, second = kept if (life + late) % 2 else kept[::-1]
            if late % 3 or parts[late % len(parts)] == "settle":
                first.cut(step)  # one is done before the other is killed
            cut_short(second, step, parts[late % len(parts)])
            break
    for shard in shards:
        assert shard.records.shape == truths[0][0].shape


def cut_short(kept, step, part):
    """A cut by a process that is killed within it."""
    if part == "before":
        return
    scatter = module.routing.scatter_rows
    marks = kept._write_marks

    def killed(*_):
        raise Killed

    def half(given, rows, records):
        scatter(given, rows[: len(rows) // 2], records)
        raise Killed

    if part == "settle":
        kept.cut(step)
    if part in ("bring in", "settle"):
        module.routing.scatter_rows = half
    elif part == "journal":
        kept._write_marks = killed
    else:
        kept._write_marks = lambda step: (marks(step), killed())
    try:
        if part == "settle":
            kept._settle()
        else:
            kept.cut(step)
    except Killed:
        pass
    finally:
        module.routing.scatter_rows = scatter
        kept._write_marks = marks


def test_heads_say_which_steps_are_there():
    shard = shard_of()
    memory = memory_of(shard)
    assert steps_in(memory) == set()
    kept = KeptRows(shard, memory)
    kept.begin(4)
    kept.cut(7)
    assert steps_in(memory[:HEAD_BYTES]) == {4, 7}


def test_a_journal_is_brought_in_beside_what_goes_on_and_a_cut_waits_for_it():
    shard = shard_of()
    memory = memory_of(shard)
    kept = KeptRows(shard, memory)
    kept.begin(0)
    for step in range(1, 20):
        train(shard, step)
        kept.cut(step)
        kept.settle()
    wanted = shard.records.copy()
    deadline = time.monotonic() + 10
    while kept.steps() != {19}:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    train(shard, 20)
    kept.restore(19)
    assert np.array_equal(shard.records, wanted)
