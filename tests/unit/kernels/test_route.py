import numpy as np
import pytest

from pibroch.exchange.rows import BatchIds, group
from pibroch.kernels.gather_pool.numba import gradient_sources
from pibroch.kernels.route import naive
from pibroch.kernels.route import numba as fast
from pibroch.kernels.route.numba import Homes
from pibroch.planner.assignment import Assignment
from pibroch.planner.row_map import RowMap


def homes_of(num_rows, num_parts):
    """Parts laid end to end, feature by feature."""
    first = np.full((len(num_rows), max(num_parts)), -(10**9), np.int64)
    end = 0
    for feature, (rows, parts) in enumerate(zip(num_rows, num_parts, strict=True)):
        for part in range(parts):
            first[feature, part] = end
            end += len(range(part, rows, parts))
    nothing = np.empty(0, np.uint16), np.empty(0, np.uint32), np.empty(0, np.int64)
    unmapped = np.full(len(num_rows), -1, np.int64)
    return Homes(
        np.array(num_rows, np.int64), np.array(num_parts, np.uint32), first, unmapped, *nothing
    )


@pytest.mark.parametrize("num_parts", [(1, 1, 1), (1, 3, 4), (7, 2, 5)])
def test_addresses_as_naive_and_one_to_one(num_parts):
    num_rows = (7, 100, 1 << 40)
    size = 50
    homes = homes_of(num_rows, num_parts)
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.integers(0, rows, size) for rows in num_rows])
    values[-1] = num_rows[-1] - 1
    offsets = np.arange(len(values) + 1)
    expected = np.empty(len(values), np.int64)
    got = np.empty(len(values), np.int64)
    assert naive.resolve_addresses(values, offsets, homes, expected) == -1
    assert fast.resolve_addresses(values, offsets, homes, got) == -1
    assert np.array_equal(got, expected)
    pairs = set(zip(np.repeat([0, 1, 2], size).tolist(), values.tolist(), strict=True))
    assert len(set(got.tolist())) == len(pairs)


def test_addresses_of_rows_with_homes_of_their_own_as_naive_and_one_to_one():
    rng = np.random.default_rng(1)
    parts = {
        "a": rng.integers(0, 5, 50).astype(np.uint16),
        "b": rng.integers(0, 5, 300).astype(np.uint16),
    }
    row_map = RowMap.of(
        Assignment(parts, np.array([0, 1, 1, 0, 2], np.uint16), np.zeros((5, 3), np.bool_))
    )
    counts = np.array([[100, 0, 0, 0], *row_map.counts.values()])
    first = (counts.cumsum() - counts.ravel()).reshape(counts.shape)
    homes = Homes(
        np.array([100, 50, 300]),
        np.array([1, 4, 4], np.uint32),
        first,
        np.array([-1, 0, 50]),
        row_map.partition,
        row_map.index,
        row_map.place_of,
    )
    values = np.concatenate([np.arange(50), np.arange(50), np.arange(50)])
    offsets = np.arange(151)
    expected = np.empty(150, np.int64)
    got = np.empty(150, np.int64)
    assert naive.resolve_addresses(values, offsets, homes, expected) == -1
    assert fast.resolve_addresses(values, offsets, homes, got) == -1
    assert np.array_equal(got, expected)
    assert len(set(got.tolist())) == 150
    for number, table in ((1, "a"), (2, "b")):
        for place in range(3):
            ids = row_map.rows_at(table, place).ids[:50]
            ids = ids[ids < 50]
            assert np.array_equal(
                got[50 * number + ids], first[number, place] + np.arange(len(ids))
            )


@pytest.mark.parametrize("bad", [-1, 7, 1 << 33, -(1 << 40)])
def test_the_first_bad_id_is_found(bad):
    homes = homes_of((7, 100), (1, 3))
    values = np.array([1, 2, bad, bad, 5, 6, 7, 8])
    offsets = np.arange(9)
    out = np.empty(8, np.int64)
    assert fast.resolve_addresses(values, offsets, homes, out) == 2
    assert naive.resolve_addresses(values, offsets, homes, out) == 2


@pytest.mark.parametrize("num_ids", [0, 1, 400])
def test_places_as_naive(num_ids):
    rng = np.random.default_rng(num_ids)
    num_features = 3
    lengths = np.bincount(rng.integers(0, 33, num_ids), minlength=33)
    offsets = np.concatenate([[0], lengths.cumsum()]).astype(np.int64)
    row_ids = (rng.random(num_ids) ** 3 * 50).astype(np.int64)
    grouped = group(BatchIds(row_ids, offsets, np.empty(0, np.float32), False, num_features, False))
    source = np.empty(num_ids, np.int32)
    gradient_sources(offsets, np.arange(num_features), num_features, source)
    assert np.array_equal(grouped.source, source)
    places = np.full(num_ids, -1, np.int64)
    fast.places(grouped, places, 0, len(grouped.rows))
    assert np.array_equal(places, naive.places(grouped))
    assert np.array_equal(grouped.rows[places], row_ids)


def test_gathered_rows_are_the_weights():
    records = np.random.default_rng(0).random((20, 7)).astype(np.float32)
    rows = np.array([3, 3, 19, 0])
    out = np.full((4, 5), np.nan, np.float32)
    fast.gather_rows(records, rows, out, 0, 4)
    assert np.array_equal(out, records[rows, :5])
