"""Weights of 16 bits: how they are rounded, read and updated."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pibroch.embedding.rows import NO_ROWS
from pibroch.kernels import parallel
from pibroch.kernels.gather_pool import naive as pooling_naive
from pibroch.kernels.gather_pool import numba as pooling
from pibroch.kernels.narrow import naive, numba
from pibroch.kernels.route import numba as routing
from pibroch.kernels.scatter_update.narrow import Rounding
from row_updates import OPTIMIZERS, a_step, beside_others

NO_COLUMNS = np.empty(0, np.int32)
WORDS = [
    0x00000000, 0x80000000, 0x00000001, 0x0000FFFF, 0x00010000, 0x3F800000, 0x3F807FFF, 0x3F808000,
    0x3F808001, 0x3F818000, 0xBF80FFFF, 0x3F7FFFFF, 0x7F7F0000, 0x7F800000, 0xFF800000, 0x7F800001,
    0xFFC00000, 0x7FFFFFFF, 0xFF80FFFF,
]  # fmt: skip
SPECIAL = np.array(WORDS, np.uint32).view(np.float32)


def keys_of(step, num_columns, seed=1):
    keys = np.empty(num_columns, np.uint32)
    numba.keys_of(step, seed, keys)
    return keys


def rounded(numbers, keys, first_columns=NO_COLUMNS):
    """Float32 ``[R, D]`` as the kernel rounds it."""
    words = numbers.copy().view(np.uint32)
    numba.round_rows(words, len(words), words.shape[1], keys, first_columns)
    return words.view(np.float32)


def test_to_the_nearest_as_naive_and_as_torch():
    drawn = np.random.default_rng(0).integers(0, 1 << 32, 3000, np.uint32).view(np.float32)
    numbers = np.concatenate(
        [SPECIAL, drawn, (drawn.view(np.uint32) & 0xFFFF8000).view(np.float32)]
    ).reshape(1, -1)
    result = np.empty(numbers.shape, np.uint16)
    numba.nearest(numbers, result)
    assert np.array_equal(result, naive.nearest(numbers))
    assert np.array_equal(rounded(numbers, np.empty(0, np.uint32)).view(np.uint32) >> 16, result)
    expected = torch.from_numpy(numbers).bfloat16().float().numpy()
    finite = ~np.isnan(numbers)
    assert np.array_equal(
        naive.widened(result)[finite].view(np.uint32), expected[finite].view(np.uint32)
    )
    assert np.isnan(naive.widened(result)[~finite]).all()


@pytest.mark.parametrize("dim", [1, 2, 7, 16, 33])
def test_by_chance_as_naive_to_one_of_two_neighbours(dim):
    numbers = np.random.default_rng(dim).standard_normal((40, dim)).astype(np.float32)
    keys = keys_of(3, dim + 5)
    result = rounded(numbers, keys)
    assert np.array_equal(
        result.view(np.uint32) >> 16,
        naive.stochastic(numbers, np.broadcast_to(keys[:dim], numbers.shape)),
    )
    low = (numbers.view(np.uint32) & 0xFFFF0000).view(np.float32)
    high = (low.view(np.uint32) + 0x10000).view(np.float32)
    assert ((result == low) | (result == high)).all()
    assert (result == low).any() and (result == high).any()
    shifted = rounded(
        numbers, keys, np.full(40, 5, np.int32)
    )  # a block that begins at column 5 has its keys
    assert np.array_equal(shifted, rounded(numbers, keys[5:].copy()))


def test_what_needs_no_rounding_stays_what_it_is():
    numbers = np.concatenate([SPECIAL, -SPECIAL]).reshape(2, -1)
    exact = (numbers.view(np.uint32) & 0xFFFF) == 0
    for step in range(50):
        result = rounded(numbers, keys_of(step, numbers.shape[1]))
        special = ~np.isfinite(numbers)
        assert np.array_equal(np.isnan(result), np.isnan(numbers))
        assert np.array_equal(result[np.isinf(numbers)], numbers[np.isinf(numbers)])
        assert np.array_equal(result[exact & ~special], numbers[exact & ~special])


def test_the_distribution_of_rounding_has_no_bias():
    """The share that is rounded up is what is cut over what may be added.

    Within five standard errors, for all that is cut.
    """
    cut = np.array([1, 2, 100, 0x2000, 0x4000, 0x8000, 0xC000, 0xFFF0, 0xFFFF], np.uint32)
    num_steps = 400
    dim = 256
    for base in (0x3F800000, 0xBD4C0000, 0x00010000):
        numbers = np.repeat((base + cut).view(np.float32)[:, None], dim, 1)
        ups = [
            (rounded(numbers, keys_of(step, dim)).view(np.uint32) >> 16) - (base >> 16)
            for step in range(num_steps)
        ]
        share = np.mean(ups, axis=(0, 2))
        right = cut / 65536
        assert (
            np.abs(share - right) <= 5 * np.sqrt(right * (1 - right) / (num_steps * dim)) + 1e-9
        ).all(), share - right


def test_the_distribution_of_draws_of_steps_columns_and_near_numbers_has_no_correlation():
    """Correlations of 100,000 draws are below five standard errors."""
    near = np.arange(0x3F808000 - 128, 0x3F808000 + 128, dtype=np.uint32).view(np.float32)
    numbers = np.repeat(near[:, None], 20, 1)
    ups = np.array(
        [(rounded(numbers, keys_of(step, 20)).view(np.uint32) >> 16) - 0x3F80 for step in range(20)]
    )
    draws = ups.astype(np.float64) - 0.5  # [step, number, column]
    for axis in range(3):
        for lag in (1, 2, 7):
            size = draws.shape[axis] - lag
            one, other = (draws.take(range(start, start + size), axis) for start in (0, lag))
            assert abs((one * other).mean()) * 4 < 5 / np.sqrt(one.size)


@pytest.mark.parametrize("dim", [1, 5, 16, 48, 511])
@pytest.mark.parametrize("scaled", [False, True])
def test_pools_as_naive(dim, scaled):
    rng = np.random.default_rng(dim)
    records = rng.standard_normal((60, dim + 3)).astype(np.float32).view(np.uint16)
    records[:, :dim] = naive.nearest(rng.standard_normal((60, dim)))
    lengths = rng.integers(0, 4, 12)
    offsets = np.concatenate([[0], lengths.cumsum()])
    ids = rng.integers(0, 60, lengths.sum())
    scale = rng.random(lengths.sum() if scaled else 0).astype(np.float32)
    pooled, expected = (np.full((4, 3 * dim), np.nan, np.float32) for _ in range(2))
    first = np.arange(3) * dim
    pooling.gather_pool(records, ids, NO_ROWS, offsets, scale, first, dim, pooled, False, 0, 12)
    pooling_naive.gather_pool(records, ids, NO_ROWS, offsets, scale, first, dim, 1, expected)
    np.testing.assert_allclose(pooled, expected, rtol=1e-5, atol=1e-6)
    out = np.full((len(ids), dim), np.nan, np.float32)
    routing.gather_rows(records, ids, out, 0, len(ids))
    assert np.array_equal(out, naive.widened(records[ids, :dim]))


def test_streams_past_the_caches_what_it_would_have_stored():
    rng = np.random.default_rng(0)
    records = naive.nearest(rng.standard_normal((60, 34)))
    ids = rng.integers(0, 60, 12)
    offsets = np.arange(13)
    none = np.empty(0, np.float32)
    room = np.full(12 * 32 + 16, np.nan, np.float32)
    first = -(room.ctypes.data // 4) % 16
    pooled = room[first : first + 12 * 32].reshape(4, 96)
    expected = np.empty((4, 96), np.float32)
    how = records, ids, NO_ROWS, offsets, none, np.arange(3) * 32, 32
    pooling.gather_pool(*how, pooled, True, 0, 12)
    pooling_naive.gather_pool(*how, 1, expected)
    assert np.array_equal(pooled, expected)


def narrow_step(optimizer, dim, **how):
    """Records with bfloat16 weights, the same as float32, and a step's rows and gradients."""
    wide, grouped, gradients = a_step(dim, optimizer.record_width(dim), **how)
    wide[:, :dim] = naive.widened(naive.nearest(wide[:, :dim]))
    records = np.zeros((len(wide), optimizer.record_width(dim, "bfloat16")), np.float32)
    records.view(np.uint16)[:, :dim] = naive.nearest(wide[:, :dim])
    records[:, (dim + 1) // 2 :] = wide[:, dim:]
    return records, wide, grouped, gradients


@pytest.mark.parametrize("dim", [1, 2, 7, 16, 33])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_those_of_float32_rows_rounded(name, dim):
    optimizer = OPTIMIZERS[name]
    records, wide, grouped, gradients = narrow_step(
        optimizer, dim, num_rows=400, num_ids=700, scaled=dim % 2 == 1
    )
    stored = records.view(np.uint16)
    for step in (1, 2, 3):
        hyper = optimizer.hyper(0.1 / step, step).as_float32()
        keys = keys_of(step, dim)
        rounding = Rounding(keys, NO_COLUMNS, -1, 0.0, step)
        beside = beside_others(grouped, gradients, 1, step)
        type(optimizer).narrow_kernel(
            records, stored, *beside, hyper, rounding, 0, len(grouped.rows)
        )
        type(optimizer).kernel(wide, grouped, gradients, hyper, 0, len(grouped.rows))
        weights = wide[grouped.rows, :dim]
        wide[grouped.rows, :dim] = naive.widened(
            naive.stochastic(weights, np.broadcast_to(keys, weights.shape))
        )
        assert np.array_equal(naive.widened(stored[:, :dim]), wide[:, :dim])
        assert np.array_equal(records[:, (dim + 1) // 2 :], wide[:, dim:])


@pytest.mark.parametrize("name", ["sgd_clipped", "row_wise_adagrad", "adam"])
def test_threads_change_no_bit_and_untouched_rows_stay(name):
    optimizer = replace(OPTIMIZERS[name], average=0.9)
    dim = 24
    records, _, grouped, gradients = narrow_step(optimizer, dim, num_rows=5000, num_ids=3000)
    before = records.copy()
    together = records.copy()
    columns = (grouped.rows % 3).astype(np.int32)
    rounding = Rounding(
        keys_of(1, dim + 2), columns, dim + sum(optimizer.moments(dim).values()), 0.9, 1
    )
    how = (grouped, gradients, optimizer.hyper(0.1, 1).as_float32(), rounding)
    kernel = type(optimizer).narrow_kernel
    kernel(records, records.view(np.uint16), *how, 0, len(grouped.rows))
    bounds = [0, 1, 100, len(grouped.rows)]
    parallel.run_ranges(kernel, bounds, together, together.view(np.uint16), *how)
    assert np.array_equal(records.view(np.uint32), together.view(np.uint32))
    untouched = np.setdiff1d(np.arange(5000), grouped.rows)
    assert np.array_equal(records[untouched].view(np.uint32), before[untouched].view(np.uint32))
    assert not np.array_equal(
        records[grouped.rows].view(np.uint32), before[grouped.rows].view(np.uint32)
    )
