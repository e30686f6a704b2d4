import numpy as np
import pytest

from pibroch.planner.kernels.profile import naive, numba


@pytest.mark.parametrize("num_rows, sizes", [(1, [1, 3]), (7, [0, 5, 40]), (300, [64, 64, 1, 64])])
def test_counts_of_accesses_and_batches(num_rows, sizes):
    rng = np.random.default_rng(num_rows)
    batches_of_ids = [(rng.random(size) ** 3 * num_rows).astype(np.int64) for size in sizes]
    accesses = np.zeros(num_rows, np.int64)
    batches = np.zeros(num_rows, np.int32)
    last = np.zeros(num_rows, np.int32)
    for number, ids in enumerate(batches_of_ids, 1):
        assert numba.count_batch(ids[: len(ids) // 2], number, accesses, batches, last) == -1
        assert numba.count_batch(ids[len(ids) // 2 :], number, accesses, batches, last) == -1
    expected = naive.count(batches_of_ids, num_rows)
    assert accesses.tolist() == expected[0].tolist()
    assert batches.tolist() == expected[1].tolist()


@pytest.mark.parametrize("bad", [-1, 5, 2**40])
def test_an_id_outside_the_table_is_named(bad):
    counts = np.zeros(5, np.int64), np.zeros(5, np.int32), np.zeros(5, np.int32)
    assert numba.count_batch(np.array([1, 2, bad, 3]), 1, *counts) == 2
