"""The interaction kernel against its plain meaning, values and gradients."""

import numpy as np
import pytest
import torch

from pibroch.kernels import parallel
from pibroch.kernels.interaction import naive
from pibroch.kernels.interaction import numba as fast

SHAPES = [
    (0, 3, 4),
    (1, 1, 1),
    (7, 2, 3),
    (1, 26, 16),
    (5, 26, 16),
    (3, 15, 15),
    (3, 16, 17),
    (2, 39, 10),
    (2, 40, 64),
    (3, 31, 33),
    (1, 5, 512),
    (2, 7, 8),
    (4, 1, 128),
]


def random_inputs(batch: int, num_features: int, dim: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    num_pairs = num_features * (num_features + 1) // 2
    shapes = [(batch, dim), (batch, num_features, dim), (batch, dim + num_pairs)]
    return tuple(rng.standard_normal(shape, dtype=np.float32) for shape in shapes)


def run_forward(bottom: np.ndarray, embedded: np.ndarray) -> np.ndarray:
    batch, num_features, dim = embedded.shape
    out = np.full((batch, dim + num_features * (num_features + 1) // 2), np.nan, np.float32)
    fast.forward(bottom, embedded, out, 0, batch)
    return out


def run_backward(
    bottom: np.ndarray, embedded: np.ndarray, grad: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    grad_bottom = np.full_like(bottom, np.nan)
    grad_embedded = np.full_like(embedded, np.nan)
    fast.backward(bottom, embedded, grad, grad_bottom, grad_embedded, 0, len(bottom))
    return grad_bottom, grad_embedded


@pytest.mark.parametrize("shape", SHAPES)
def test_forward_is_the_naive_one(shape: tuple[int, int, int]) -> None:
    bottom, embedded, _ = random_inputs(*shape)
    want = naive.forward(bottom.astype(np.float64), embedded.astype(np.float64))
    np.testing.assert_allclose(run_forward(bottom, embedded), want, rtol=1e-5, atol=1e-6 * shape[2])


@pytest.mark.parametrize("shape", SHAPES)
def test_backward_is_the_naive_one(shape: tuple[int, int, int]) -> None:
    inputs = random_inputs(*shape)
    want = naive.backward(*(array.astype(np.float64) for array in inputs))
    for got, wanted in zip(run_backward(*inputs), want, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6 * shape[1])


def test_naive_backward_is_the_gradient_of_naive_forward() -> None:
    bottom, embedded, grad = (array.astype(np.float64) for array in random_inputs(2, 3, 4))
    grad_bottom, grad_embedded = naive.backward(bottom, embedded, grad)
    step = 1e-6
    for array, gradient in ((bottom, grad_bottom), (embedded, grad_embedded)):
        for place in np.ndindex(array.shape):
            array[place] += step
            up = (naive.forward(bottom, embedded) * grad).sum()
            array[place] -= 2 * step
            down = (naive.forward(bottom, embedded) * grad).sum()
            array[place] += step
            assert (up - down) / (2 * step) == pytest.approx(gradient[place], abs=1e-6)


def test_order_of_pairs_is_that_of_torch() -> None:
    bottom, embedded, _ = random_inputs(3, 6, 5)
    vectors = torch.cat([torch.from_numpy(bottom)[:, None], torch.from_numpy(embedded)], 1)
    rows, columns = torch.tril_indices(7, 7, -1)
    want = torch.bmm(vectors, vectors.transpose(1, 2))[:, rows, columns]
    np.testing.assert_allclose(
        run_forward(bottom, embedded)[:, 5:], want.numpy(), rtol=1e-5, atol=1e-5
    )


def test_bits_do_not_depend_on_how_samples_are_divided() -> None:
    bottom, embedded, grad = random_inputs(37, 26, 16)
    whole = run_forward(bottom, embedded)
    (whole_bottom, whole_embedded) = run_backward(bottom, embedded, grad)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            out = np.empty_like(grad)
            grad_bottom = np.empty_like(bottom)
            grad_embedded = np.empty_like(embedded)
            parallel.run(fast.forward, 37, bottom, embedded, out, grain=5)
            parallel.run(
                fast.backward, 37, bottom, embedded, grad, grad_bottom, grad_embedded, grain=5
            )
            assert np.array_equal(out, whole)
            assert np.array_equal(grad_bottom, whole_bottom)
            assert np.array_equal(grad_embedded, whole_embedded)
    finally:
        torch.set_num_threads(threads)


def test_a_range_is_all_that_is_written() -> None:
    bottom, embedded, grad = random_inputs(6, 4, 3)
    out = np.full_like(grad, 7.0)
    fast.forward(bottom, embedded, out, 2, 4)
    assert np.array_equal(out[:2], np.full_like(out[:2], 7.0))
    assert np.array_equal(out[4:], np.full_like(out[4:], 7.0))
    assert np.array_equal(out[2:4], run_forward(bottom, embedded)[2:4])


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_bad_number_stays_in_its_sample_and_is_seen(poison: float) -> None:
    bottom, embedded, grad = random_inputs(3, 20, 17)
    clean = run_forward(bottom, embedded)
    embedded[1, 4, 2] = poison
    out = run_forward(bottom, embedded)
    assert not np.isfinite(out[1]).all()
    assert np.array_equal(out[[0, 2]], clean[[0, 2]])
    _, grad_embedded = run_backward(bottom, embedded, grad)
    assert np.isfinite(grad_embedded[[0, 2]]).all()
    assert not np.isfinite(grad_embedded[1]).all()
