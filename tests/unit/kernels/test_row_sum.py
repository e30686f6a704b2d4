from itertools import pairwise

import numpy as np
import pytest

from pibroch.embedding.rows import NO_ROWS
from pibroch.kernels.gather_pool import naive
from pibroch.kernels.gather_pool import numba as fast
from pibroch.kernels.policy import kernel
from pibroch.kernels.row_sum import BLOCKS, sum_rows


@kernel
def summed(numbers, rows, order, scale, begin, end, dim, out, place):
    sum_rows(numbers, rows, order, scale, 3, begin, end, dim, 5, out, place)


def in_order(numbers, rows, scale):
    """Each column's sum row by row in float32, factors multiplied in at double precision."""
    total = np.zeros(numbers.shape[1], np.float64)
    for place, row in enumerate(rows):
        factor = np.float64(scale[place]) if len(scale) else 1.0
        total = (total + factor * numbers[row]).astype(np.float32).astype(np.float64)
    return total.astype(np.float32)


def test_blocks_cover_every_dim():
    assert sorted(BLOCKS, reverse=True) == list(BLOCKS)
    assert BLOCKS[-1] == 1
    assert all(wide == 2 * narrow for wide, narrow in pairwise(BLOCKS))


@pytest.mark.parametrize("dim", [1, 2, 3, 7, 8, 15, 31, 33, 127, 128, 129, 255, 256, 300, 1024])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 50])
def test_sums_are_in_the_order_of_rows_to_the_bit(dim, num_rows):
    rng = np.random.default_rng(dim)
    numbers = rng.standard_normal((40, dim)).astype(np.float32)
    rows = rng.integers(0, 37, num_rows + 4)
    out = np.full(dim + 7, np.nan, np.float32)
    summed(numbers, rows, None, np.empty(0, np.float32), 2, 2 + num_rows, dim, out, 3)
    expected = in_order(numbers, 3 + rows[2 : 2 + num_rows], ())
    assert np.array_equal(out[3 : 3 + dim], expected)
    assert np.isnan(out[:3]).all()
    assert np.isnan(out[3 + dim :]).all()


@pytest.mark.parametrize("dim", [1, 6, 40, 200])
@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_places_through_an_order_with_factors(dim, kind):
    rng = np.random.default_rng(dim)
    numbers = rng.standard_normal((40, dim)).astype(np.float32)
    rows = rng.integers(0, 37, 30).astype(kind)
    scale = rng.random(30).astype(np.float32)
    order = rng.permutation(30).astype(np.int32)
    out = np.empty(dim, np.float32)
    summed(numbers, rows, order, scale, 4, 21, dim, out, 0)
    chosen = order[4:21]
    expected = in_order(numbers, 3 + rows[chosen], scale[chosen])
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dim", [1, 5, 24, 130])
@pytest.mark.parametrize("scaled", [False, True])
def test_pooled_bfloat16_is_as_naive(dim, scaled):
    rng = np.random.default_rng(3)
    records = rng.integers(0x3F00, 0x4100, (40, dim + 3)).astype(np.uint16)
    offsets = np.array([0, 1, 1, 4, 50, 51, 60])
    ids = rng.integers(0, 40, 60)
    scale = rng.random(60).astype(np.float32) if scaled else np.empty(0, np.float32)
    pooled, expected = (np.full((3, 2 * dim), np.nan, np.float32) for _ in range(2))
    first = np.arange(2) * dim
    fast.gather_pool(records, ids, NO_ROWS, offsets, scale, first, dim, pooled, False, 0, 6)
    naive.gather_pool(records, ids, NO_ROWS, offsets, scale, first, dim, 1, expected)
    np.testing.assert_allclose(pooled, expected, rtol=1e-5)
