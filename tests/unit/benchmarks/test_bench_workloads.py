import gzip

import numpy as np
import pytest
from benchmarks.cases import BOTTOM_STREAM, TOP_STREAM, Arrays, Case, initial_layers, initial_table
from benchmarks.workloads import SAMPLE_NAME, Workload, criteo_batches, drawn_batches, sample_path

from pibroch.errors import DataError

SHAPE = {"num_batches": 3, "batch_size": 500, "num_tables": 4, "num_rows": 1000}


@pytest.mark.parametrize("kind", ["zipf", "uniform"])
def test_drawn_ids_have_shape_and_range(kind):
    batches = drawn_batches(Workload(kind, **SHAPE))
    assert batches.ids.shape == (3, 4, 500)
    assert batches.dense.shape == (3, 500, 13)
    assert batches.ids.min() >= 0
    assert batches.ids.max() < 1000
    assert set(np.unique(batches.labels)) == {0.0, 1.0}


def test_zipf_ids_follow_their_distribution():
    """Exact shares of the continuous distribution.

    Rank k gets the integral of x^-s from k to k + 1.
    """
    workload = Workload("zipf", num_batches=4, batch_size=20_000, num_tables=2, num_rows=1000)
    counts = (
        np.sort(np.bincount(drawn_batches(workload).ids.ravel(), minlength=1000))[::-1] / 160_000
    )
    power = 1 - workload.skew
    edges = np.arange(1, 1002, dtype=float) ** power
    expected = np.diff(edges) / (edges[-1] - edges[0])
    assert counts[0] == pytest.approx(expected[0], rel=0.05)
    assert counts[:10].sum() == pytest.approx(expected[:10].sum(), rel=0.02)
    uniform = drawn_batches(
        Workload("uniform", num_batches=4, batch_size=20_000, num_tables=2, num_rows=1000)
    )
    assert np.bincount(uniform.ids.ravel()).max() / 160_000 < 0.002


def test_written_batches_come_back(tmp_path):
    workload = Workload("zipf", **SHAPE)
    stored = Arrays.load(workload.write(tmp_path))
    drawn = drawn_batches(workload)
    assert len(stored) == 3
    for field in ("ids", "dense", "labels"):
        np.testing.assert_array_equal(getattr(stored, field), getattr(drawn, field))


def test_criteo_rows_are_parsed(tmp_path, monkeypatch):
    """A row made up here: label, 13 integers, 26 hexadecimal categories, empty ones included."""
    row = ["1", "3", "", "-2", *["0"] * 10, "00000010", "", *["ffffffff"] * 24]
    with gzip.open(tmp_path / SAMPLE_NAME, "wt") as file:
        file.write("\t".join(row) + "\n" + "\t".join(["0", *row[1:]]) + "\n")
    monkeypatch.setenv("PIBROCH_TEST_DATA", str(tmp_path))
    batches = criteo_batches(Workload("criteo", num_batches=1, batch_size=2, num_rows=1000))
    assert batches.labels.tolist() == [[1.0, 0.0]]
    assert batches.ids[0, :3, 0].tolist() == [16, 0, 0xFFFFFFFF % 1000]
    np.testing.assert_allclose(batches.dense[0, 0, :3], [np.log(4), 0, 0], rtol=1e-6)
    again = criteo_batches(Workload("criteo", num_batches=3, batch_size=2, num_rows=1000))
    assert again.labels[0].tolist() == [1.0, 0.0]
    assert [sorted(labels) for labels in again.labels.tolist()] == [[0.0, 1.0]] * 3


def test_a_missing_sample_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PIBROCH_TEST_DATA", str(tmp_path))
    assert sample_path() is None
    with pytest.raises(DataError, match="PIBROCH_TEST_DATA"):
        criteo_batches(Workload("criteo", **SHAPE))


def test_starting_weights_depend_on_seed_and_table_alone():
    case = Case("", dim=8, num_rows=50, num_tables=3)
    table = initial_table(case, 1)
    np.testing.assert_array_equal(table, initial_table(case, 1))
    assert not np.array_equal(table, initial_table(case, 2))
    assert abs(table).max() <= 0.25
    assert [weight.shape for weight, _ in initial_layers(case, BOTTOM_STREAM)] == [
        (512, 13),
        (256, 512),
        (8, 256),
    ]
    assert [weight.shape for weight, _ in initial_layers(case, TOP_STREAM)] == [
        (512, 8 + 6),
        (256, 512),
        (1, 256),
    ]


@pytest.mark.parametrize(
    ("optimizer", "floats"), [("sgd", 0), ("adagrad", 8), ("rowwise_adagrad", 1)]
)
def test_bytes_of_state(optimizer, floats):
    case = Case("", dim=8, num_rows=50, num_tables=3, sparse_optimizer=optimizer)
    assert (case.parameter_bytes, case.state_bytes) == (4 * 150 * 8, 4 * 150 * floats)
