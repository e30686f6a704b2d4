import numpy as np
import pytest

from pibroch.embedding import SGD, Adagrad, Adam, RowWiseAdagrad, RowWiseAdam
from pibroch.kernels import parallel
from pibroch.kernels.scatter_update import naive
from pibroch.kernels.scatter_update import numba as fast
from pibroch.kernels.scatter_update.numba import Grouped
from row_updates import OPTIMIZERS, a_step, beside_others

NAIVE = {SGD: naive.sgd, Adagrad: naive.adagrad, RowWiseAdagrad: naive.row_wise_adagrad}
NAIVE |= {Adam: naive.adam, RowWiseAdam: naive.row_wise_adam}


@pytest.mark.parametrize("dim", [1, 2, 7, 16, 33, 64, 512])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_as_naive(name, dim):
    optimizer = OPTIMIZERS[name]
    records, grouped, gradients = a_step(dim, optimizer.record_width(dim), scaled=dim % 2 == 1)
    expected = records.astype(np.float64)
    update = type(optimizer).kernel
    for step in (1, 2, 3):
        hyper = optimizer.hyper(0.1 / step, step)
        for u, row in enumerate(grouped.rows):
            positions = grouped.order[grouped.segments[u] : grouped.segments[u + 1]]
            gradient = naive.combine(gradients, grouped.source, grouped.scale, positions)
            NAIVE[type(optimizer)](expected[row], gradient, hyper)
        update(records, grouped, gradients, hyper.as_float32(), 0, len(grouped.rows))
    np.testing.assert_allclose(records, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("dim", "unit", "behind"), [(12, 1, 5), (12, 4, 3), (64, 8, 1), (16, 16, 2), (512, 64, 1)]
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_beside_others_update_to_the_bit_alike(name, dim, unit, behind):
    optimizer = OPTIMIZERS[name]
    records, grouped, gradients = a_step(dim, optimizer.record_width(dim), scaled=dim == 64)
    hyper = optimizer.hyper(0.1, 1).as_float32()
    beside = records.copy()
    type(optimizer).kernel(records, grouped, gradients, hyper, 0, len(grouped.rows))
    type(optimizer).kernel(
        beside, *beside_others(grouped, gradients, unit, behind), hyper, 0, len(grouped.rows)
    )
    assert np.array_equal(records, beside)


@pytest.mark.parametrize(
    ("dim", "unit", "behind"), [(1, 1, 0), (3, 1, 4), (16, 16, 1), (130, 26, 2)]
)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_sums_as_naive(dim, unit, behind, scaled, share):
    _, grouped, gradients = a_step(dim, dim, scaled=scaled)
    expected = naive.sum_gradients(grouped, gradients, share)
    grouped, gradients = beside_others(grouped, gradients, unit, behind)
    totals = np.full((len(grouped.rows), dim), np.nan, np.float32)
    fast.sum_gradients(grouped, gradients, np.float32(share), totals, 0, len(grouped.rows))
    np.testing.assert_allclose(totals, expected, rtol=2e-5, atol=1e-5)
    np.testing.assert_array_equal(expected, naive.sum_gradients(grouped, gradients, share))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_threads_change_no_bit_and_untouched_rows_stay(name):
    optimizer = OPTIMIZERS[name]
    dim = 24
    records, grouped, gradients = a_step(
        dim, optimizer.record_width(dim), num_rows=5000, num_ids=3000
    )
    before = records.copy()
    together = records.copy()
    arguments = (grouped, gradients, optimizer.hyper(0.1, 1).as_float32())
    type(optimizer).kernel(records, *arguments, 0, len(grouped.rows))
    bounds = [0, 1, 100, len(grouped.rows)]
    parallel.run_ranges(type(optimizer).kernel, bounds, together, *arguments)
    assert np.array_equal(records, together)
    untouched = np.setdiff1d(np.arange(5000), grouped.rows)
    assert np.array_equal(records[untouched], before[untouched])
    assert not np.array_equal(records[grouped.rows], before[grouped.rows])


def test_a_row_sums_in_the_order_given():
    """float32 sums depend on their order: 1e8 + 1 - 1e8 is 0 one way and 1 the other."""
    gradients = np.array([[1e8], [1.0], [-1e8]], np.float32)
    for order, total in (([0, 1, 2], 0.0), ([0, 2, 1], 1.0)):
        records = np.zeros((1, 1), np.float32)
        grouped = Grouped(
            np.zeros(1, np.int64),
            np.array([0, 3], np.int32),
            np.array(order, np.int32),
            np.arange(3, dtype=np.int32),
            np.empty(0, np.float32),
        )
        SGD.kernel(records, grouped, gradients, SGD(lr=1.0).hyper(1.0, 1).as_float32(), 0, 1)
        assert records[0, 0] == -total
