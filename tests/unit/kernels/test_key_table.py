"""The table of keys against a dictionary."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pibroch.kernels import key_table, parallel
from pibroch.kernels.key_table.naive import RowOf, decayed

LIMITS = np.iinfo(np.int64)


def clashing(num, seed):
    """Keys of one home: the upper half of their hash by this seed is 0.

    The finaliser is a bijection, of which this is the inverse.
    """
    mask = (1 << 64) - 1
    keys = []
    for z in range(num):
        x = z ^ (z >> 31) ^ (z >> 62)
        x = x * pow(0x94D049BB133111EB, -1, 1 << 64) & mask
        x = x ^ (x >> 27) ^ (x >> 54)
        x = x * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & mask
        keys.append(x ^ (x >> 30) ^ (x >> 60))
    return np.array(keys, np.uint64).view(np.int64) ^ seed


def ints(numbers):
    return [None if number < 0 else number for number in numbers.tolist()]


def inserted(table, keys, counts, step):
    rows = np.full(len(keys), -9, np.int64)
    key_table.insert(table, np.array(keys, np.int64), np.array(counts, np.int64), step, rows)
    return rows.tolist()


def check_alike(table, naive):
    used = np.flatnonzero(table.entries[:, 1])
    keys = table.entries[used, 0]
    seen = table.entries[used, 1]
    assert {
        key: (row, last, count)
        for key, row, last, count in zip(
            keys.tolist(),
            used.tolist(),
            (seen >> 32).tolist(),
            (seen & 0xFFFFFFFF).tolist(),
            strict=True,
        )
    } == {key: (entry.row, entry.last, entry.count) for key, entry in naive.entries.items()}
    assert table.counts[0] == len(used)
    assert ints(key_table.find(table, keys)) == used.tolist()
    lengths = np.zeros(len(used) + 2, np.int64)
    key_table.count_distances(table, lengths)
    assert lengths.sum() == len(used)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    num_rows=st.sampled_from([1, 5, 64, 130]),
    half_life=st.sampled_from([0, 0, 2]),
    are_clashing=st.booleans(),
)
def test_any_program_does_what_a_dictionary_does(seed, num_rows, half_life, are_clashing):
    rng = np.random.default_rng(seed)
    num_keys = 2 * num_rows + 3
    keys = rng.integers(LIMITS.min, LIMITS.max, num_keys, endpoint=True)
    keys[:3] = LIMITS.min, LIMITS.max, -1
    table = key_table.empty_table(num_rows)
    keys = clashing(num_keys, table.counts[2]) if are_clashing else np.unique(keys)
    naive = RowOf(num_rows)
    for step in range(1, 15):
        some = rng.choice(keys, int(rng.integers(0, 2 * num_rows)))
        counts = rng.integers(1, 4, len(some)).astype(np.int32)
        rows, misses = key_table.touch(table, some, counts, step, half_life)
        found = naive.touch(some.tolist(), counts.tolist(), step, half_life)
        assert ints(rows) == found == ints(key_table.find(table, some))
        assert misses.tolist() == [i for i, row in enumerate(found) if row is None]
        new = np.unique(some[misses])[: len(naive.free)].tolist()
        assert inserted(table, new, [step] * len(new), step) == naive.insert(
            new, [step] * len(new), step
        )
        scores = (
            ({}, lambda entry: entry.last),
            (
                {"by_count": True, "half_life": half_life},
                lambda entry, step=step: (decayed(entry, step, half_life), entry.last),
            ),
        )
        num = int(rng.integers(0, num_rows + 1))
        for options, score in scores:
            least = key_table.least(table, num, step, **options).tolist()
            assert least == naive.least(num, step, score)
        leaving = rng.permutation(np.array(least, np.int64))
        removed = np.empty(len(leaving), np.int64)
        key_table.remove(table, leaving, removed)
        assert removed.tolist() == [naive.key_of(row) for row in leaving.tolist()]
        naive.remove(leaving.tolist())
        check_alike(table, naive)
        bound = int(rng.integers(0, step + 1))
        assert key_table.older_than(table, bound, step).tolist() == sorted(
            entry.row for entry in naive.entries.values() if entry.last < bound
        )
        other = key_table.empty_table(num_rows)
        other.entries[:] = table.entries
        key_table.rebuild(other)
        check_alike(other, naive)
        assert other.free.tolist() == table.free.tolist()
        if step % 2:
            table = other
    check_alike(key_table.copy_of(table), naive)


@pytest.fixture
def small_sample(monkeypatch):
    """Tables of a few thousand rows are large then."""
    monkeypatch.setattr(key_table, "SAMPLE", 400)


@pytest.mark.usefixtures("small_sample")
@pytest.mark.parametrize("scores", ["last steps", "counts", "given", "one"])
def test_least_rows_of_a_large_table_are_those_of_a_sort(scores):
    """Large enough that a sample says where they end; also where all are alike."""
    num_rows = 5 * key_table.SAMPLE
    rng = np.random.default_rng(5)
    table = key_table.empty_table(num_rows)
    keys = rng.permutation(2 * num_rows)[: num_rows - 100] - num_rows
    step = 400
    table.entries[: len(keys), 0] = keys
    last = rng.integers(7 if scores == "one" else 1, 8 if scores == "one" else step + 1, num_rows)
    count = rng.geometric(0.2, num_rows)
    table.entries[: len(keys), 1] = ((last << 32) | count)[: len(keys)]
    key_table.rebuild(table)
    given_scores = rng.integers(-50, 50, num_rows)
    options, score = {
        "last steps": ({}, last),
        "one": ({}, last),
        "counts": ({"by_count": True}, (count << 32) | last),
        "given": ({"given": given_scores}, given_scores),
    }[scores]
    some = np.flatnonzero(last[: len(keys)] != step)
    order = some[np.lexsort((keys[some], score[some]))]
    for num in (0, 1, 1000, num_rows // 16, num_rows // 2, len(order), num_rows):
        least = key_table.least(table, num, step, **options)
        assert least.tolist() == np.sort(order[:num]).tolist()


@pytest.mark.usefixtures("small_sample")
def test_a_wrong_sample_costs_time_alone():
    """All rows of the sample are young, and the others old."""
    num_rows = 4 * key_table.SAMPLE
    table = key_table.empty_table(num_rows)
    table.entries[:, 0] = np.arange(num_rows)
    table.entries[:, 1] = 1 << 32 | 1
    table.entries[::4, 1] = 9 << 32 | 1
    key_table.rebuild(table)
    least = key_table.least(table, 3 * key_table.SAMPLE + 5, 20)
    right = np.concatenate([np.flatnonzero(np.arange(num_rows) % 4), np.arange(0, 20, 4)])
    assert least.tolist() == np.sort(right).tolist()


def test_counts_stay_at_the_greatest():
    table = key_table.empty_table(2)
    inserted(table, [5], [key_table.MOST_COUNT + 7], 1)
    key_table.touch(table, np.array([5, 5]), np.array([1 << 30, 9], np.int32), 2)
    assert table.entries[0].tolist() == [5, (2 << 32) | key_table.MOST_COUNT]


def test_searches_stay_short():
    rng = np.random.default_rng(1)
    num_rows = 1000
    table = key_table.empty_table(num_rows)
    for step in range(1, 41):
        leaving = key_table.least(table, num_rows // 4, step)
        key_table.remove(table, leaving, np.empty(len(leaving), np.int64))
        free = num_rows - int(table.counts[0])
        inserted(table, rng.integers(LIMITS.min, LIMITS.max, free), np.ones(free), step)
    lengths = np.zeros(64, np.int64)
    key_table.count_distances(table, lengths)
    assert np.cumsum(lengths)[8] >= 0.99 * num_rows


def test_keys_chosen_for_one_table_are_ordinary_in_another():
    chosen = clashing(1000, key_table.empty_table(1000).counts[2])
    table = key_table.empty_table(1000)
    inserted(table, chosen, np.ones(1000), 1)
    lengths = np.zeros(64, np.int64)
    key_table.count_distances(table, lengths)
    assert np.cumsum(lengths)[8] >= 990


def test_threads_share_a_long_search(monkeypatch):
    monkeypatch.setattr(parallel, "num_threads", lambda: 2)
    table = key_table.empty_table(10_000)
    keys = np.arange(-20_000, 20_000, 4)
    rows = inserted(table, keys, np.ones(len(keys)), 1)
    asked = np.arange(-20_000, 20_000)
    expected = np.full(len(asked), -1)
    expected[::4] = rows
    assert np.array_equal(key_table.find(table, asked), expected)
