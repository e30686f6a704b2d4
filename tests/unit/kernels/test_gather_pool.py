import numpy as np
import pytest
import torch

from pibroch.embedding.rows import NO_ROWS
from pibroch.kernels import parallel
from pibroch.kernels.gather_pool import naive
from pibroch.kernels.gather_pool import numba as fast
from pibroch.kernels.memory import can_stream

RAGGED = [0, 1, 2, 5, 0, 3, 1, 1, 7, 0, 0, 2]


def bags(lengths, num_rows, seed=0):
    """Ids below num_rows, with many duplicates, and the offsets of bags of these lengths."""
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = (rng.random(offsets[-1]) ** 6 * num_rows).astype(np.int64)
    return ids, offsets, rng


def side_by_side(dim, num_features, before=0, between=0, behind=0):
    """The features' first columns and S, where others lie around them."""
    first = before + np.arange(num_features) * (dim + between)
    return first, int(first[-1]) + dim + behind


@pytest.mark.parametrize("around", [(0, 0, 0), (5, 3, 0), (0, 1, 9)])
@pytest.mark.parametrize("dim", [1, 2, 3, 15, 16, 17, 64, 100, 128, 511, 512])
@pytest.mark.parametrize("scaled", [False, True])
def test_pools_as_naive(dim, scaled, around):
    ids, offsets, rng = bags(RAGGED, 40)
    records = rng.standard_normal((40, dim + 3)).astype(np.float32)
    scale = rng.random(len(ids)).astype(np.float32) if scaled else np.empty(0, np.float32)
    first, width = side_by_side(dim, 3, *around)
    pooled, expected = (np.full((4, width), np.nan, np.float32) for _ in range(2))
    fast.gather_pool(records, ids, NO_ROWS, offsets, scale, first, dim, pooled, False, 0, 12)
    naive.gather_pool(records, ids, NO_ROWS, offsets, scale, first, dim, 1, expected)
    assert np.isnan(pooled).sum() == 4 * (width - 3 * dim)
    np.testing.assert_allclose(pooled, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lengths", [[0] * 6, [1] * 6, [9000] + [0] * 5, [1]])
def test_empty_and_lopsided_bags(lengths):
    ids, offsets, rng = bags(lengths, 7)
    records = rng.standard_normal((7, 5)).astype(np.float32)
    features = 3 if len(lengths) == 6 else 1
    pooled, expected = (
        np.full((len(lengths) // features, features * 4), np.nan, np.float32) for _ in range(2)
    )
    none = np.empty(0, np.float32)
    first = np.arange(features) * 4
    fast.gather_pool(records, ids, NO_ROWS, offsets, none, first, 4, pooled, False, 0, len(lengths))
    naive.gather_pool(
        records.astype(np.float64), ids, NO_ROWS, offsets, none, first, 4, 1, expected
    )
    np.testing.assert_allclose(pooled, expected, rtol=1e-3, atol=1e-2)


def test_no_samples():
    pooled = np.empty((0, 12), np.float32)
    fast.gather_pool(
        np.ones((2, 4), np.float32),
        NO_ROWS,
        NO_ROWS,
        np.zeros(1, np.int64),
        np.empty(0, np.float32),
        np.arange(3) * 4,
        4,
        pooled,
        False,
        0,
        0,
    )


def test_threads_change_no_bit():
    ids, offsets, rng = bags(rng_lengths(6000), 500)
    records = rng.standard_normal((500, 33)).astype(np.float32)
    none = np.empty(0, np.float32)
    alone = np.empty((2000, 96), np.float32)
    together = np.empty((2000, 96), np.float32)
    arguments = (records, ids, NO_ROWS, offsets, none, np.arange(3) * 32, 32)
    fast.gather_pool(*arguments, alone, False, 0, 6000)
    parallel.run_ranges(fast.gather_pool, [0, 17, 3100, 6000], *arguments, together, False)
    assert np.array_equal(alone, together)


def rng_lengths(count):
    return np.random.default_rng(5).integers(0, 5, count)


@pytest.mark.parametrize("bad", [-1, 10, 2**40, -(2**62)])
def test_resolve_finds_the_first_bad_id(bad):
    offsets = np.arange(7)
    values = np.array([0, 1, 2, 9, 8, 7])
    first = np.array([0, 100])
    limit = np.array([10, 10])
    rows = np.empty(6, np.int64)
    assert fast.resolve_rows(values, offsets, first, limit, rows, 0, 6) == -1
    expected = np.empty(6, np.int64)
    assert naive.resolve_rows(values, offsets, first, limit, expected) == -1
    assert rows.tolist() == expected.tolist() == [0, 1, 2, 109, 108, 107]
    assert fast.first_absent(values, offsets, limit, 0, 6) == -1
    assert naive.first_absent(values, offsets, limit) == -1
    values[4] = values[5] = bad
    assert fast.resolve_rows(values, offsets, first, limit, rows, 0, 6) == 4
    assert fast.first_absent(values, offsets, limit, 0, 6) == 4
    assert naive.first_absent(values, offsets, limit) == 4
    assert naive.resolve_rows(values, offsets, first, limit, expected) == 4


def test_resolve_looks_at_the_bags_of_its_range_alone():
    offsets = np.array([0, 2, 2, 3, 3, 5, 7])  # three features, two samples
    values = np.array([0, 99, 1, 1, 99, 2, 2])
    first = np.array([0, 10, 20])
    limit = np.array([10, 10, 10])
    expected = np.array([0, 99, 11, 11, 119, 22, 22])
    for start in range(7):
        for stop in range(start, 7):
            rows = np.full(7, -7)
            result = fast.resolve_rows(values, offsets, first, limit, rows, start, stop)
            begin = offsets[start]
            end = offsets[stop]
            assert fast.first_absent(values, offsets, limit, start, stop) == result
            assert result == next((place for place in (1, 4) if begin <= place < end), -1)
            if result < 0:
                assert rows[begin:end].tolist() == expected[begin:end].tolist()
            assert (rows[:begin] == -7).all()
            assert (rows[end:] == -7).all()


@pytest.mark.parametrize("weighted", [False, True])
def test_scale_and_sources_as_naive(weighted):
    ids, offsets, rng = bags(RAGGED, 40)
    weights = rng.random(len(ids)).astype(np.float32) if weighted else np.empty(0, np.float32)
    mean = np.array([True, False, True])
    scale = np.empty(len(ids), np.float32)
    source = np.empty(len(ids), np.int32)
    fast.pooling_scale(offsets, weights, mean, scale)
    first = np.array([4, 0, 7])
    rows_per_sample = 9
    fast.gradient_sources(offsets, first, rows_per_sample, source)
    expected = np.empty(len(ids), np.float32)
    naive.pooling_scale(offsets, weights, mean, expected)
    np.testing.assert_allclose(scale, expected, rtol=1e-6)
    expected = np.empty(len(ids), np.int32)
    naive.gradient_sources(offsets, first, rows_per_sample, expected)
    assert source.tolist() == expected.tolist()


@pytest.mark.parametrize("around", [(0, 0, 0), (32, 16, 48)])
@pytest.mark.parametrize("dim", [16, 64, 128])
def test_streamed_copies_are_the_same(dim, around):
    ids, offsets, rng = bags(RAGGED, 40)
    records = rng.standard_normal((40, dim + 1)).astype(np.float32)
    first, width = side_by_side(dim, 3, *around)
    none = np.empty(0, np.float32)
    pooled, expected = (torch.full((4, width), torch.nan).numpy() for _ in range(2))
    assert can_stream(pooled)
    fast.gather_pool(records, ids, NO_ROWS, offsets, none, first, dim, pooled, True, 0, 12)
    naive.gather_pool(records, ids, NO_ROWS, offsets, none, first, dim, 1, expected)
    np.testing.assert_allclose(pooled, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("target", "can"), [((4, 16), True), ((4, 17), False), ((4, 8), False), ((16,), True)]
)
def test_rows_must_be_whole_cache_lines(target, can):
    assert can_stream(torch.empty(target).numpy()) is can
    assert not can_stream(torch.empty(1 + 64).numpy()[1:])


@pytest.mark.parametrize("stream", [False, True])
def test_rows_from_each_features_first_on(stream):
    ids, offsets, rng = bags(RAGGED, 40)
    records = rng.standard_normal((60, 16)).astype(np.float32)
    none = np.empty(0, np.float32)
    first_rows = np.array([20, 0, 7])
    row_ids = ids + np.repeat(np.repeat(first_rows, 4), RAGGED)
    pooled, expected, definition = (torch.full((4, 48), torch.nan).numpy() for _ in range(3))
    columns = np.arange(3) * 16
    fast.gather_pool(records, ids, first_rows, offsets, none, columns, 16, pooled, stream, 0, 12)
    fast.gather_pool(records, row_ids, NO_ROWS, offsets, none, columns, 16, expected, stream, 0, 12)
    naive.gather_pool(records, ids, first_rows, offsets, none, columns, 16, 1, definition)
    assert np.array_equal(pooled, expected)
    np.testing.assert_allclose(pooled, definition, rtol=1e-5, atol=1e-6)
