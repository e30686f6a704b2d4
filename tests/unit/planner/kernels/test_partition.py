import numpy as np
import pytest

from pibroch.planner.kernels.partition import naive, numba


@pytest.mark.parametrize(
    "num_rows, max_accesses, max_rows",
    [(1, 5.0, 3), (50, 0.0, 1), (200, 30.0, 7), (400, 9.5, 1000)],
)
@pytest.mark.parametrize("dense", [1, 8, 10_000])
def test_runs_of_equal_counts_are_cut_as_sorted_rows_are(num_rows, max_accesses, max_rows, dense):
    rng = np.random.default_rng(num_rows)
    accesses = (rng.pareto(1.0, num_rows) * 2).astype(np.int64)
    batches = np.minimum(accesses, 5).astype(np.int32)
    rows = np.zeros(dense, np.int64)
    sums = np.zeros(dense, np.int64)
    numba.count_counts(accesses, batches, rows, sums)
    assert rows.sum() == (accesses < dense).sum() and sums.sum() == batches[accesses < dense].sum()
    hot = np.flatnonzero(accesses >= dense)
    hot = hot[np.argsort(-accesses[hot], kind="stable")]
    counts = np.concatenate([accesses[hot], np.flatnonzero(rows)[::-1]])
    num_of = np.concatenate([np.ones(len(hot), np.int64), rows[np.flatnonzero(rows)[::-1]]])
    batch_sums = np.concatenate([batches[hot], sums[np.flatnonzero(rows)[::-1]]]).astype(float)
    stops = np.empty(1000, np.int64)
    sums = np.empty((1000, 3))
    number = numba.cut(counts, num_of, batch_sums, max_accesses, max_rows, stops, sums)
    cursor = np.zeros(dense, np.int64)
    current = np.zeros(dense, np.int64)
    starts = np.cumsum(num_of) - num_of
    cursor[counts[len(hot) :]] = starts[len(hot) :]
    current[counts[len(hot) :]] = np.searchsorted(stops[:number], starts[len(hot) :], side="right")
    out = np.full(num_rows, 60_000, np.uint16)
    numba.assign(accesses, cursor, current, stops[:number], 0, out)
    out[hot] = np.searchsorted(stops[:number], np.arange(len(hot)), side="right")
    assert out.tolist() == naive.partition(accesses, max_accesses, max_rows).tolist()
    assert np.bincount(out, minlength=number).tolist() == sums[:number, 0].tolist()
    assert np.bincount(out, accesses, number).tolist() == sums[:number, 1].tolist()
    assert sums[:number, 2].sum() == pytest.approx(batches.sum())


def test_too_many_partitions_are_said():
    counts = np.array([3, 1])
    num_rows = np.array([4, 4])
    stops = np.empty(7, np.int64)
    sums = np.empty((7, 3))
    assert numba.cut(counts, num_rows, np.zeros(2), 0.0, 1, stops, sums) == -1
    assert numba.cut(counts, num_rows, np.zeros(2), 6.0, 2, stops, sums) == 4
