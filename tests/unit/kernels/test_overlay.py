"""Rows that have a newer version elsewhere."""

import numpy as np
import pytest

from pibroch.kernels.overlay import naive
from pibroch.kernels.overlay import numba as fast


def redirected(row_ids, changed, first, slots=None):
    slots = fast.slots_of(changed, first) if slots is None else slots
    out = np.empty_like(row_ids)
    shift = fast.shift_of(slots, first)
    fast.redirect(row_ids, changed, slots, shift, first, out, 0, len(row_ids))
    return out


@pytest.mark.parametrize("stride", [1, 7, 1 << 16, 1 << 33, (1 << 31) + 1])
@pytest.mark.parametrize("count", [0, 1, 15, 1000])
def test_as_naive(count, stride):
    rng = np.random.default_rng(count)
    changed = stride * np.concatenate(
        [np.arange(count), rng.integers(0, 2 * count + 1, count // 3)]
    )
    row_ids = stride * rng.integers(0, 3 * count + 1, 500)
    assert np.array_equal(
        redirected(row_ids, changed, 10**12), naive.redirect(row_ids, changed, 10**12)
    )


def test_only_its_range_is_written():
    out = np.full(5, -7)
    changed = np.array([3])
    slots = fast.slots_of(changed, 100)
    fast.redirect(np.full(5, 3), changed, slots, fast.shift_of(slots, 100), 100, out, 1, 3)
    assert out.tolist() == [-7, 100, 100, -7, -7]


@pytest.mark.parametrize("most", [3, 16, 40, 1000, 4096])
def test_a_table_grows_by_versions_and_is_no_larger_than_its_rows(most):
    rng = np.random.default_rng(most)
    row_ids = np.arange(-1, most + 1)
    changed = np.empty(0, np.int64)
    slots = None
    for size in (1, 2, 30, 0, 500, 3000):
        known = len(changed)
        changed = np.concatenate([changed, rng.integers(0, most, size)])
        before = None if slots is None else slots.copy()
        grown = fast.slots_of(changed, most, slots, known)
        assert len(grown) <= most
        assert np.array_equal(
            redirected(row_ids, changed, most, grown), naive.redirect(row_ids, changed, most)
        )
        assert slots is None or np.array_equal(slots, before), "the older version still answers"
        slots = grown
