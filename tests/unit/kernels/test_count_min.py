"""The sketch against its plain form, and its promise."""

import numpy as np
import pytest

from pibroch.kernels import count_min
from pibroch.kernels.count_min import naive


@pytest.mark.parametrize("width", [1, 7, 300])
@pytest.mark.parametrize("limit", [2, 5, 255])
def test_counts_are_those_of_the_plain_form(width, limit):
    rng = np.random.default_rng(width)
    cells, right_cells = np.zeros((2, count_min.NUM_HASHES, width), np.uint8)
    for _ in range(20):
        keys = np.unique(rng.integers(-(1 << 62), 1 << 62, int(rng.integers(0, 60))) >> 55)
        counts = rng.integers(1, 30, len(keys))
        totals = np.empty(len(keys), np.int64)
        count_min.add(cells, keys, counts, limit, totals)
        assert totals.tolist() == naive.add(right_cells, keys, counts, limit).tolist()
        np.testing.assert_equal(cells, right_cells)
    assert cells.any()


def test_order_makes_no_difference():
    rng = np.random.default_rng(2)
    keys = np.arange(100)
    counts = rng.integers(1, 9, 100)
    order = rng.permutation(100)
    cells, other = np.zeros((2, count_min.NUM_HASHES, 30), np.uint8)
    totals, other_totals = np.empty((2, 100), np.int64)
    for _ in range(4):
        count_min.add(cells, keys, counts, 200, totals)
        count_min.add(other, keys[order], counts[order], 200, other_totals)
        assert other_totals.tolist() == totals[order].tolist()
        np.testing.assert_equal(cells, other)
