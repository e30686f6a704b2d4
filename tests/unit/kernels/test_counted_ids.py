"""Distinct ids with counts in few bytes."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pibroch.kernels.counted_ids import MAX_BYTES, decode, encode, naive

LIMITS = np.iinfo(np.int64)
ids = st.lists(st.integers(LIMITS.min, LIMITS.max) | st.integers(-3, 200), max_size=60)


def flat(tables):
    numbers = np.array([id_ for table in tables for id_ in table], np.int64)
    return numbers, np.cumsum([0, *map(len, tables)])


def encoded(tables):
    numbers, bounds = flat(tables)
    out = np.empty(MAX_BYTES * len(numbers), np.uint8)
    sizes = np.empty(len(tables), np.int64)
    places = np.empty(len(numbers), np.int32)
    return out[: encode(numbers, bounds, out, sizes, places)], sizes, places


def decoded(message, sizes, starts, num):
    distinct = np.zeros(num, np.int64)
    counts = np.zeros(num, np.int32)
    return decode(message, sizes, starts, distinct, counts), distinct, counts


@settings(max_examples=150, deadline=None)
@given(st.lists(ids, min_size=1, max_size=4))
@example([[LIMITS.min, 0, LIMITS.min, LIMITS.max], [], [-1, 0]])
@example([[7] * 400, [63, 64, 64, 127, 128]])
def test_encodes_as_naive_and_decodes_what_was_encoded(tables):
    message, sizes, places = encoded(tables)
    assert message.tobytes() == naive.encode(tables)
    num = int(sizes.sum())
    taken, distinct, counts = decoded(message, sizes, np.cumsum(sizes) - sizes, num)
    assert taken == len(message)
    assert distinct[places].tolist() == flat(tables)[0].tolist()
    bounds = np.cumsum([0, *sizes])
    for table, (begin, end) in zip(tables, pairwise(bounds), strict=True):
        found = dict(zip(distinct[begin:end].tolist(), counts[begin:end].tolist(), strict=True))
        assert found == Counter(table)


def test_the_parts_of_ranks_lie_beside_each_other_in_each_table():
    ranks = [[[5, 5, 9], [1]], [[5], [1, 2]]]
    starts = np.array([[0, 3], [2, 4]])
    distinct = np.zeros(6, np.int64)
    counts = np.zeros(6, np.int32)
    for tables, where in zip(ranks, starts, strict=True):
        message, sizes, _ = encoded(tables)
        assert decode(message, sizes, where, distinct, counts) == len(message)
    assert distinct.tolist() == [5, 9, 5, 1, 1, 2]
    assert counts.tolist() == [2, 1, 1, 1, 1, 1]


def test_ids_of_a_batch_take_two_bytes():
    rng = np.random.default_rng(0)
    message, sizes, _ = encoded([rng.integers(0, 100_000, 2048)])
    assert len(message) < 2 * sizes[0]


@pytest.mark.parametrize(
    "message", [[], [6], [7], [255] * 40, [6, 128], [7, *[255] * 12], [6, 7, 128]]
)
def test_bytes_that_end_too_early_or_never_are_refused(message):
    two = np.array([2])
    taken, *_ = decoded(np.array(message, np.uint8), two, np.array([0]), 2)
    assert taken == -1
