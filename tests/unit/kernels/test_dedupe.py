import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pibroch.kernels import parallel
from pibroch.kernels.dedupe import naive
from pibroch.kernels.dedupe import numba as fast


def grouped(row_ids, sequence=None):
    sequence = np.arange(len(row_ids), dtype=np.int32) if sequence is None else sequence
    rows = np.full(len(row_ids), -7, np.int64)
    order = np.full(len(row_ids), -7, np.int32)
    segments = np.full(len(row_ids), -7, np.int32)
    count = fast.dedupe(row_ids, sequence, rows, segments, order, 0, len(row_ids))
    return rows[:count].tolist(), [*segments[:count].tolist(), len(row_ids)], order.tolist()


@settings(max_examples=60, deadline=None)
@given(
    arrays.arrays(
        np.int64, st.integers(0, 300), elements=st.integers(0, 2**50) | st.integers(0, 5)
    ),
    st.randoms(),
)
def test_as_naive_for_any_ids_and_sequence(row_ids, random):
    sequence = list(range(len(row_ids)))
    random.shuffle(sequence)
    sequence = np.array(sequence, np.int32)
    expected = (
        tuple(part.tolist() for part in naive.dedupe(row_ids, sequence))
        if len(row_ids)
        else ([], [0], [])
    )
    assert grouped(row_ids, sequence) == expected


@pytest.mark.parametrize(
    "ids", [[], [5], [5] * 1000, list(range(1000, 0, -1)), [2**62, 0, 2**62, 1]]
)
def test_edges(ids):
    ids = np.array(ids, np.int64)
    rows, segments, order = grouped(ids)
    assert rows == sorted(set(ids.tolist()))
    assert segments[-1] == len(ids)
    assert sorted(order) == list(range(len(ids)))


def test_sample_major_sequence_visits_samples_first():
    offsets = np.array([0, 2, 3, 3, 4, 6, 7])  # two features, three samples, feature-major
    sequence = np.empty(7, np.int32)
    fast.sample_major_sequence(offsets, 2, sequence)
    assert sequence.tolist() == [0, 1, 3, 2, 4, 5, 6]


def test_ranges_that_share_no_id_are_grouped_apart():
    row_ids = np.array([5, 4, 5, 90, 80, 90, 80])
    rows = np.zeros(7, np.int64)
    segments = np.zeros(7, np.int32)
    order = np.zeros(7, np.int32)
    bounds = [0, 3, 3, 7]
    sequence = np.arange(7, dtype=np.int32)
    assert parallel.run_ranges(fast.dedupe, bounds, row_ids, sequence, rows, segments, order) == [
        2,
        0,
        2,
    ]
    assert (rows[:2].tolist(), rows[3:5].tolist()) == ([4, 5], [80, 90])
    assert (segments[:2].tolist(), segments[3:5].tolist()) == ([0, 1], [3, 5])
    assert order.tolist() == [1, 0, 2, 4, 6, 3, 5]
