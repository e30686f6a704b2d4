"""Dropout by counter against its plain meaning."""

import numpy as np
import pytest

from pibroch.kernels.dropout import naive
from pibroch.kernels.dropout import numba as fast

KEY = 0xFEDCBA9876543210


def run(
    x: np.ndarray,
    p: float,
    first: int | np.ndarray,
    start: int = 0,
    stop: int | None = None,
) -> np.ndarray:
    out = np.full_like(x, 7.0)
    threshold = np.uint64(round(p * 2**32))
    scale = np.float32(1 / (1 - p))
    fast.dropout(
        x,
        out,
        np.uint64(KEY),
        threshold,
        scale,
        first + np.arange(len(x)) if isinstance(first, int) else first,
        start,
        len(x) if stop is None else stop,
    )
    return out


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (1, 1), (5, 2), (4, 7), (2, 33), (3, 64)])
@pytest.mark.parametrize("p", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("first_sample", [0, 12345, 2**40])
def test_kernel_is_the_naive_one(shape: tuple[int, int], p: float, first_sample: int) -> None:
    x = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    numbers = first_sample + np.arange(len(x)) * 3
    assert np.array_equal(run(x, p, numbers), naive.dropout(x, KEY, p, numbers.tolist()))


def test_a_sample_has_its_mask_in_any_batch() -> None:
    x = np.ones((9, 6), np.float32)
    parts = [run(x[:4], 0.5, 100), run(x[4:4], 0.5, 104), run(x[4:], 0.5, 104)]
    assert np.array_equal(np.concatenate(parts), run(x, 0.5, 100))
    places = np.array([7, 0, 3])
    assert np.array_equal(run(x[places], 0.5, 100 + places), run(x, 0.5, 100)[places])


def test_a_range_is_all_that_is_written() -> None:
    x = np.ones((6, 5), np.float32)
    out = run(x, 0.5, 3, 2, 4)
    assert np.array_equal(out[[0, 1, 4, 5]], np.full((4, 5), 7.0, np.float32))
    assert np.array_equal(out[2:4], run(x, 0.5, 3)[2:4])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_distribution(p: float) -> None:
    kept = run(np.ones((4000, 101), np.float32), p, 0) > 0
    deviation = np.sqrt(p * (1 - p))
    assert abs(kept.mean() - (1 - p)) < 4 * deviation / np.sqrt(kept.size)
    for axis in (0, 1):  # neither a sample nor a column is favoured
        size = kept.shape[axis]
        assert np.abs(kept.mean(axis) - (1 - p)).max() < 5 * deviation / np.sqrt(size)
    centred = kept - kept.mean()
    for neighbour in (
        centred[:, 1:] * centred[:, :-1],
        centred[1:] * centred[:-1],
        centred[:, 51:] * centred[:, :50],
    ):
        assert abs(neighbour.mean()) < 5 * deviation**2 / np.sqrt(neighbour.size)


def test_not_a_number_is_seen() -> None:
    x = np.full((8, 8), np.nan, np.float32)
    assert np.isnan(run(x, 0.5, 0)).all()
