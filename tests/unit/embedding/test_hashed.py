"""Indices of hashed tables against dictionaries, by schedules of steps."""

import copy
import json
from dataclasses import dataclass, fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_hashed import NaiveIndex

import pibroch as pb
from grids import examples
from pibroch.data.event_clock import runs_of
from pibroch.embedding import EvictionPolicy, Hashed, HashedIndex
from pibroch.embedding.admission import SketchedIds
from pibroch.embedding.row_index import check_state, load_state, state_of
from pibroch.errors import CheckpointError, ConfigError, DataError
from pibroch.kernels.key_table import MOST_STEP

ODDS = (0.5, 0.1, 0.2, 0.05, 0.09, 0.01, 0.05)
"""Of times beside the step's: some clocks are wrong."""
EDGES = (np.iinfo(np.int64).min, -1, 0, 1, np.iinfo(np.int64).max)


@dataclass(frozen=True)
class OddFirst(EvictionPolicy):
    """A user's own: odd ids leave first, and of these the most frequent."""

    weight: int = 2

    name = "odd_first"

    def scores(self, ids, counts, last_steps, step):
        return -self.weight * counts * (ids & 1) - step


POLICIES = (
    pb.LeastRecent(),
    pb.LeastFrequent(),
    pb.LeastFrequent(half_life=3),
    OddFirst(),
)
ADMISSIONS = (
    pb.AfterCount(1),
    pb.AfterCount(3),
    pb.AfterCount(3, candidates=7),
    pb.AfterCount(3, sketch=True, candidates=40),
)


@dataclass
class Schedule:
    """Steps of ids of which most do not have a row for long."""

    seed: int
    capacity: int
    most_per_step: int
    num_steps: int = 24
    event_times: tuple = ()

    def steps(self):
        rng = np.random.default_rng(self.seed)
        some = rng.integers(*EDGES[::4], 3 * self.capacity // 2 + 1, endpoint=True)
        pool = np.unique(np.concatenate([EDGES, some, np.arange(2, 6)]))
        rng.shuffle(pool)
        now = -100
        hot = pool[: max(1, self.capacity // 2)]
        for _ in range(self.num_steps):
            now += int(rng.choice([-3, 0, 1, 40, 700], p=[0.1, 0.3, 0.4, 0.15, 0.05]))
            apart = rng.choice([0, 1, 2, -50, 30, *EDGES[::4]], rng.integers(0, 6), p=ODDS)
            self.event_times = [
                min(max(now + int(each), EDGES[0] + 1), EDGES[-1]) for each in apart
            ]
            num = int(rng.integers(0, self.most_per_step + 1))
            is_hot = rng.random(num) < 0.6
            yield np.where(is_hot, rng.choice(hot, num), rng.choice(pool, num))


schedules = st.builds(
    Schedule,
    st.integers(0, 1 << 30),
    st.sampled_from([1, 3, 16, 40, 70]),
    st.sampled_from([2, 20, 60]),
)
kinds = st.builds(
    Hashed,
    st.sampled_from(ADMISSIONS),
    st.sampled_from(POLICIES),
    st.sampled_from([None, None, 1, 3, 40]),
    st.booleans(),
    st.sampled_from([None, None, 0.016, 0.3]),
)


def tell_times(schedule, *indices):
    """The event times of a step that is to be learned."""
    times = np.array(schedule.event_times, np.int64)
    for index in indices:
        index.event_times = schedule.event_times
        index.event_runs = runs_of(times, index.event_span_ms)


def learned(index, *args):
    """What an index learned in a step, as lists; the error in place of it."""
    try:
        changes = index.learn(*args)
    except DataError:
        return "refused"
    return [getattr(changes, field.name).tolist() for field in fields(changes)]


def saved(index):
    return {name: array.copy() for name, array in index.state().items()}


def fresh_with(index, kind):
    """Another index, from what the first one has saved."""
    other = kind.index(index.capacity)
    other.load_state(saved(index))
    return other


@settings(max_examples=examples(900), deadline=None)
@given(schedules, kinds)
def test_any_schedule_does_what_dictionaries_do(schedule, kind):
    naive = NaiveIndex(kind, schedule.capacity + kind.unknown_row)
    index = kind.index(schedule.capacity + kind.unknown_row)
    for ids in schedule.steps():
        tell_times(schedule, naive, index)
        before = saved(index)
        right = learned(naive, ids)
        assert learned(index, ids) == right
        if right == "refused":
            np.testing.assert_equal(saved(index), before)
        assert index.rows_of(ids).tolist() == naive.rows_of(ids).tolist()
        assert naive.counters().items() <= index.counters().items() or kind.admit.sketch
    rows, ids = index.entries()
    right_rows, right_ids = naive.entries()
    assert (rows.tolist(), ids.tolist()) == (right_rows.tolist(), right_ids.tolist())
    assert index.search_lengths().sum() == len(rows)


@settings(max_examples=examples(300), deadline=None)
@given(schedules, kinds, st.integers(0, 9))
def test_ids_given_between_steps_are_in_dictionaries_too(schedule, kind, when):
    naive = NaiveIndex(kind, schedule.capacity + kind.unknown_row)
    index = kind.index(schedule.capacity + kind.unknown_row)
    rng = np.random.default_rng(schedule.seed)
    for number, ids in enumerate(schedule.steps()):
        tell_times(schedule, naive, index)
        if number % 10 == when:
            some = rng.choice([*ids, *rng.integers(-99, 99, 3)], min(4, len(ids) + 3))
            before = saved(index)
            try:
                right = naive.insert(some).tolist()
            except DataError:
                with pytest.raises(DataError, match="rows free"):
                    index.insert(some)
                np.testing.assert_equal(saved(index), before)
            else:
                assert index.insert(some).tolist() == right
        assert learned(index, ids) == learned(naive, ids)
    rows, ids = index.entries()
    assert (rows.tolist(), ids.tolist()) == tuple(each.tolist() for each in naive.entries())
    assert index.counts_of(rows).tolist() == naive.counts_of(rows).tolist()


@settings(max_examples=examples(600), deadline=None)
@given(schedules, kinds)
def test_order_within_a_step_and_counts_apart_make_no_difference(schedule, kind):
    rng = np.random.default_rng(schedule.seed)
    index = kind.index(schedule.capacity + kind.unknown_row)
    other = kind.index(schedule.capacity + kind.unknown_row)
    for ids in schedule.steps():
        tell_times(schedule, index, other)
        distinct, counts = np.unique(ids, return_counts=True)
        parts = rng.binomial(counts, 0.5)
        apart = np.concatenate([distinct[parts > 0], distinct[parts < counts]])
        counts = np.concatenate([parts, counts - parts])
        order = rng.permutation(len(apart))
        together = learned(index, ids)
        assert learned(other, apart[order], counts[counts > 0][order].astype(np.int32)) == together
        np.testing.assert_equal(saved(other), saved(index))


@settings(max_examples=examples(600), deadline=None)
@given(schedules, kinds, st.integers(0, 23))
def test_an_index_that_was_saved_or_copied_goes_on_as_the_first(schedule, kind, when):
    index = kind.index(schedule.capacity + kind.unknown_row)
    for number, ids in enumerate(schedule.steps()):
        tell_times(schedule, index)
        if number == when:
            others = [fresh_with(index, kind), index.copy()]
            untouched = index.copy()
            at_first = saved(index)
        results = learned(index, ids), index.rows_of(ids).tolist()
        if number >= when:
            for other in others:
                tell_times(schedule, other)
                assert (learned(other, ids), other.rows_of(ids).tolist()) == results
    for other in others:
        np.testing.assert_equal(saved(other), saved(index))
    np.testing.assert_equal(saved(untouched), at_first)


@settings(max_examples=100, deadline=None)
@given(schedules, kinds)
def test_rows_learned_at_once_are_those_that_are_looked_up(schedule, kind):
    index = kind.index(schedule.capacity + kind.unknown_row)
    for ids in schedule.steps():
        try:
            _, rows = index.learn_rows(ids)
        except DataError:
            continue
        assert rows.tolist() == index.rows_of(ids).tolist()
        there = np.flatnonzero(rows >= kind.unknown_row)
        assert index.ids_of(rows[there]).tolist() == ids[there].tolist()


def test_more_ids_than_rows_are_refused_with_what_is_needed():
    index = pb.Hashed().index(3)
    index.learn(np.array([1, 2, 3]))
    with pytest.raises(DataError, match="got 5 distinct ids that want a row in step 2; need"):
        index.learn(np.array([1, 9, 8, 7, 1, 6]))
    assert index.rows_of(np.array([1, 2, 3])).tolist() == [0, 1, 2]
    assert index.counters()["steps"] == 1


def test_a_sixteenth_of_the_rows_is_free_after_an_eviction():
    index = pb.Hashed().index(160)
    for step in range(16):
        index.learn(np.arange(step * 10, step * 10 + 10))
    changes = index.learn(np.array([1000, 1001, 5]))
    assert changes.evicted_ids.tolist() == [0, 1, 2, 3, 4, *range(6, 13)]
    assert changes.fresh_rows.tolist() == [0, 1]
    assert index.counters()["used"] == 150


def test_counts_fade_whether_an_id_is_seen_or_not():
    index = pb.Hashed(evict=pb.LeastFrequent(half_life=2)).index(2)
    index.learn(np.repeat([7, 8], [9, 6]))
    index.learn(np.array([8]))  # 9 >> 1 and (6 >> 1) + 1
    index.learn(np.array([8]))  # 4 and 5
    assert index.learn(np.array([9])).evicted_ids.tolist() == [7]


def test_expired_ids_begin_anew():
    index = pb.Hashed(admit=pb.AfterCount(2), expire_after=3).index(8)
    index.learn(np.array([4, 4, 5, 5]))
    for _ in range(2):
        assert not len(index.learn(np.array([4])).expired_ids)
    changes = index.learn(np.array([5]))  # is seen in time
    assert not len(changes.expired_ids)
    changes = [index.learn(np.array([4])) for _ in range(3)]
    assert [each.expired_ids.tolist() for each in changes] == [[], [], [5]]
    assert index.rows_of(np.array([5])).tolist() == [-1]
    assert not len(index.learn(np.array([5])).fresh_ids)
    assert index.learn(np.array([5])).fresh_ids.tolist() == [5]


def test_a_wrong_clock_expires_nothing_and_a_silence_what_is_too_old():
    """Steps of one event each: a week is allowed."""
    day = 86_400_000
    index = pb.Hashed(expire_after_seconds=7 * 86_400).index(100)
    expired = []

    def learn(time, *ids):
        index.event_runs = runs_of(np.array([time] * bool(ids)), index.event_span_ms)
        expired.append(index.learn(np.array(ids)).expired_ids.tolist())

    for hour in range(24):
        learn(hour * day // 24, *range(10))
    learn(3650 * day, 1)
    learn(day, *range(10))
    assert not any(expired) and index.counters()["ahead"] == 1
    learn(5 * day, 3)  # nothing for four days
    learn(5 * day, 4)
    learn(9 * day, 50)
    learn(9 * day, 51)
    assert expired[-1] == [0, 1, 2, 5, 6, 7, 8, 9] and not any(expired[:-1])
    assert {3, 4, 50, 51} == set(index.entries()[1].tolist())


def test_a_sketch_is_never_too_low():
    rng = np.random.default_rng(3)
    waiting = SketchedIds(200, 4000)
    counts = {}
    for step in range(9):
        ids = np.unique(rng.integers(0, 300, 100))
        totals = waiting.add(ids, np.ones(len(ids), np.int64), step)
        for id_, total in zip(ids.tolist(), totals.tolist(), strict=True):
            counts[id_] = counts.get(id_, 0) + 1
            assert total >= counts[id_]


def test_what_checkpoints_keep_of_a_kind():
    kind = Hashed(pb.AfterCount(2), OddFirst(5), 100)
    assert json.loads(json.dumps(kind.described())) == {
        "name": "hashed",
        "admit": {"name": "after_count", "count": 2, "sketch": False, "candidates": None},
        "evict": {"name": "odd_first", "weight": 5},
        "expire_after": 100,
    }
    assert Hashed() == Hashed(pb.AfterCount(1), pb.LeastRecent())


@pytest.mark.parametrize("admit", ADMISSIONS)
def test_states_have_the_same_shapes_for_life(admit):
    kind = Hashed(admit)
    full, empty = ({"t": kind.index(20)} for _ in range(2))
    full["t"].learn(np.arange(15).repeat(3))
    check_state(empty, state_of(full))
    load_state(empty, state_of(full))
    assert empty["t"].counters() == full["t"].counters()


@pytest.mark.parametrize(
    "make",
    [
        lambda: pb.AfterCount(0),
        lambda: pb.AfterCount(256, sketch=True),
        lambda: pb.AfterCount(2, candidates=0),
        lambda: pb.LeastFrequent(half_life=0),
        lambda: pb.Hashed(expire_after=0),
        lambda: pb.Hashed(admit=2),  # type: ignore[arg-type]  # refused in words
        lambda: pb.Hashed(evict="least_recent"),  # type: ignore[arg-type]  # likewise
        lambda: pb.Hashed().index(1 << 31),
    ],
)
def test_settings_without_sense_are_refused(make):
    with pytest.raises(ConfigError):
        make()


def test_scores_of_another_type_are_refused():
    @dataclass(frozen=True)
    class Halves(EvictionPolicy):
        name = "halves"

        def scores(self, ids, counts, last_steps, step):
            return counts / 2

    index = Hashed(evict=Halves()).index(2)
    index.learn(np.array([1, 2]))
    with pytest.raises(ConfigError, match="float64"):
        index.learn(np.array([3]))


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(schedules, kinds), min_size=1, max_size=5), st.booleans())
def test_indices_that_learn_together_or_follow_do_what_each_does_alone(parts, are_counted):
    alone, together, behind = (
        [kind.index(each.capacity + kind.unknown_row) for each, kind in parts] for _ in range(3)
    )
    ahead, follower = HashedIndex.joint(together), HashedIndex.joint(behind)
    for step in zip(*(each.steps() for each, _ in parts), strict=True):
        steps = [ids[: each.capacity] for ids, (each, _) in zip(step, parts, strict=True)]
        bounds = np.cumsum([0, *map(len, steps)]).tolist()
        for (each, _), *indices in zip(parts, alone, together, behind, strict=True):
            for index in indices:
                tell_times(each, index)
        ids = np.concatenate(steps)
        counts = 1 + np.arange(len(ids), dtype=np.int32) % 5 if are_counted else None
        found = ahead.learn(ids, counts, bounds)
        follower.follow(ids, counts, bounds, found)
        for place, index in enumerate(alone):
            part = slice(*bounds[place : place + 2])
            changes, rows = index.learn_rows(ids[part], counts[part] if are_counted else None)
            for field in fields(changes):
                name = field.name
                assert (
                    getattr(found.changes[place], name).tolist() == getattr(changes, name).tolist()
                )
            assert found.rows[part].tolist() == rows.tolist()
        for indices in zip(alone, together, behind, strict=True):
            one, *others = map(saved, indices)
            for other in others:
                np.testing.assert_equal(one, other)
    for one, other in zip(alone, behind, strict=True):
        rows, ids = one.entries()
        assert other.rows_of(ids).tolist() == rows.tolist()


def test_a_deep_copy_learns_for_itself():
    embeddings = pb.Embeddings([pb.Table("user", 9, 2, rows=pb.Hashed())], optimizer=pb.SGD(lr=1.0))
    batch = pb.JaggedBatch.from_one_hot(
        torch.zeros(2, 0), ["user"], torch.tensor([[5, 6]]), torch.zeros(2)
    )
    embeddings(batch).sum().backward()
    before = saved(embeddings.row_indices["user"])
    copied = copy.deepcopy(embeddings)
    copied(batch).sum().backward()
    np.testing.assert_equal(saved(embeddings.row_indices["user"]), before)
    assert copied.row_indices["user"].counters()["steps"] == 2


SEED = {"u.seed": np.zeros(1, np.int64)}


@pytest.mark.parametrize("admit", ADMISSIONS)
def test_an_id_has_its_row_from_the_step_on_in_which_its_count_is_reached(admit):
    index = Hashed(admit).index(8)
    steps = [[5], [6], [5, 7, 7, 7], [5], [5]]  # 5 for the third time in the fourth step
    fresh = [index.learn(np.array(ids)).fresh_ids.tolist() for ids in steps]
    assert fresh == ([[5], [6], [7], [], []] if admit.count == 1 else [[], [], [7], [5], []])


def index_at(step, admit=ADMISSIONS[0]):
    index = Hashed(admit).index(8)
    index.learn(np.array([5, 7, 7]))
    state = saved(index)
    state["counters"][0] = step
    return index, state


@pytest.mark.parametrize("is_joint", [False, True])
def test_the_last_step_that_rows_can_note_is_followed_by_none(is_joint):
    index, state = index_at(MOST_STEP - 1)
    load_state({"u": index}, {f"u.{name}": each for name, each in state.items()} | SEED)

    def learn(ids):
        if is_joint:
            HashedIndex.joint([index]).learn(np.array(ids), None, [0, len(ids)])
        else:
            index.learn(np.array(ids))

    learn([7, 9])
    assert index.counters()["steps"] == MOST_STEP
    assert (index.state()["entries"][:, 1] >> 32).max() == MOST_STEP
    before = saved(index)
    with pytest.raises(DataError, match=r"step 2,147,483,648 .*--to safetensors"):
        learn([7, 11])
    assert all(np.array_equal(each, before[name]) for name, each in index.state().items())


@pytest.mark.parametrize("step", [-1, MOST_STEP + 1, 1 << 40, np.iinfo(np.int64).min])
@pytest.mark.parametrize("admit", ADMISSIONS)
def test_a_state_of_more_steps_than_there_can_be_is_refused_and_changes_nothing(step, admit):
    index, state = index_at(step, admit)
    before = saved(index)
    with pytest.raises(CheckpointError, match=r"of -?[\d,]+ steps; need 0 to 2,147,483,647"):
        load_state({"u": index}, {f"u.{name}": each for name, each in state.items()} | SEED)
    assert all(np.array_equal(each, before[name]) for name, each in index.state().items())


@pytest.mark.parametrize("last", [2, -1])
@pytest.mark.parametrize("name", ["entries", "candidates"])
def test_an_id_that_was_seen_in_no_step_so_far_is_refused(name, last):
    index, state = index_at(1, ADMISSIONS[1])
    state[name][3, 1] = last << 32 | 1
    with pytest.raises(CheckpointError, match=rf"among the {name} .* in step {last}; need a step"):
        load_state({"u": index}, {f"u.{name}": each for name, each in state.items()} | SEED)
