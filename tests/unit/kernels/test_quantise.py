"""Rows of bytes and halves: how they are made and looked up.

Also in files of which each holds some of the rows.
"""

import numpy as np
import pytest

from pibroch.kernels import parallel
from pibroch.kernels.bits import half_widened
from pibroch.kernels.policy import kernel
from pibroch.kernels.quantise import naive
from pibroch.kernels.quantise import numba as fast

RAGGED = [0, 1, 2, 5, 0, 3, 1, 1, 7, 0, 0, 2]
NO_SCALE = np.empty(0, np.float32)


def quantised(weights):
    records = np.full((len(weights), naive.record_bytes(weights.shape[1])), 7, np.uint8)
    fast.quantise(weights, records, records.view(np.float32), 0, len(weights))
    return records


@pytest.mark.parametrize("dim", [1, 2, 3, 8, 9, 16, 17, 64, 65])
def test_quantises_as_naive_within_half_a_step(dim):
    rng = np.random.default_rng(dim)
    weights = (rng.standard_normal((50, dim)) * 10.0 ** rng.integers(-20, 20, (50, 1))).astype(
        np.float32
    )
    weights[3] = 0
    weights[4] = -2.5
    weights[5] = np.float32(1e-42)
    records = quantised(weights)
    assert np.array_equal(records, naive.quantise(weights))
    result = naive.weights_of(records, dim)
    step = records[:, :4].copy().view(np.float32)
    assert (np.abs(result - weights) <= 0.5001 * step + 1e-6 * np.abs(weights) + 1e-28).all()
    assert np.array_equal(result[4], weights[4])


def test_extreme_rows():
    most = np.finfo(np.float32).max
    weights = np.array([[-most, most, 0, 1]], np.float32)
    records = quantised(weights)
    assert np.array_equal(records, naive.quantise(weights))
    assert np.isfinite(records[:, :8].copy().view(np.float32)).all()
    assert quantised(np.empty((0, 4), np.float32)).shape == (0, 12)


@kernel
def _widen_all(numbers, out):
    for i in range(len(numbers)):
        out[i] = half_widened(numbers[i])


def test_every_finite_half():
    halves = np.arange(1 << 16, dtype=np.uint16)
    halves = halves[np.isfinite(halves.view(np.float16))]
    out = np.empty(len(halves), np.float32)
    _widen_all(halves, out)
    assert np.array_equal(
        out.view(np.uint32), halves.view(np.float16).astype(np.float32).view(np.uint32)
    )


def cases(dim, seed=0):
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((40, dim)).astype(np.float32)
    offsets = np.concatenate([[0], np.cumsum(RAGGED)]).astype(np.int64)
    ids = (rng.random(offsets[-1]) ** 3 * 40).astype(np.int64)
    return weights, ids, offsets, rng.random(len(ids)).astype(np.float32)


@pytest.mark.parametrize("dim", [1, 3, 8, 17, 64, 130])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", ["bytes", "halves", "floats"])
def test_adds_as_naive_from_several_files(dim, scaled, kind):
    weights, ids, offsets, scale = cases(dim)
    scale = scale if scaled else NO_SCALE
    records = {
        "bytes": quantised(weights),
        "halves": weights.astype(np.float16).view(np.uint16),
        "floats": weights,
    }[kind]
    exact = {
        "bytes": lambda: naive.weights_of(records, dim),
        "halves": lambda: records.view(np.float16).astype(np.float32),
        "floats": lambda: weights,
    }[kind]()
    expected = np.zeros((4, 3, dim), np.float32)
    naive.add_rows(exact, 0, ids, offsets, scale, expected)
    result = np.zeros_like(expected)
    for first, after in ((0, 13), (13, 14), (14, 40)):
        here = np.ascontiguousarray(records[first:after])
        parts = (here, here.view(np.float32)) if kind == "bytes" else (here,)
        add = fast.add_bytes if kind == "bytes" else fast.add_numbers
        parallel.run(add, 12, *parts, first, ids, offsets, scale, result, grain=4)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


def test_rows_are_taken_from_the_parts_in_which_they_lie():
    rng = np.random.default_rng(1)
    first_rows = np.array([5, 20, 21, 40])
    num_rows = np.array([15, 1, 10, 3])
    parts = [rng.integers(0, 1 << 16, (rows, 6)).astype(np.uint16) for rows in num_rows]
    addresses = np.array([part.ctypes.data for part in parts])
    row_ids = np.concatenate([np.arange(50), rng.integers(0, 50, 40)])
    out = np.full((len(row_ids), 6), 7, np.uint16)
    fast.take(row_ids, first_rows, num_rows, addresses, out, 3, 80)
    expected = naive.take(row_ids, first_rows, parts)
    assert np.array_equal(out[3:80], expected[3:80])
    assert (out[:3] == 7).all() and (out[80:] == 7).all()
