"""What topic ``retrieve`` does besides measuring.

Which samples come first, what plans are made of, what is said of times.
"""

import numpy as np
import pytest
from benchmarks.cases import Arrays, Case
from benchmarks.comparison import OURS
from benchmarks.retrieve_plans import profile_of, split_in_time, write_plans
from benchmarks.runner import Times
from benchmarks.topics import retrieve as topic

from pibroch.planner import Plan


def test_measured_samples_come_after_those_that_plans_are_made_from():
    ids = np.arange(10 * 3 * 2).reshape(10, 3, 2)
    dense = np.zeros((10, 2, 13), np.float32)
    labels = np.arange(20, dtype=np.float32).reshape(10, 2)
    earlier, measured = split_in_time(Arrays(ids, dense, labels), world_size=2, num_measured=3)
    assert np.array_equal(earlier, ids[:4])
    assert measured.ids.shape == (3, 3, 4) and measured.dense.shape == (3, 4, 13)
    assert np.array_equal(measured.ids[0, :, :2], ids[4]) and np.array_equal(
        measured.ids[0, :, 2:], ids[5]
    )
    assert measured.labels[2].tolist() == [16, 17, 18, 19]


def test_plans_for_lookups_copy_once_a_host(tmp_path):
    rng = np.random.default_rng(0)
    ids = (rng.random((6, 2, 64)) ** 4 * 300).astype(np.int64)
    profile = profile_of(ids, 300)
    assert profile.num_accesses == ids.size and profile.tables["C1"].batches.max() <= 6
    plans = write_plans(ids, Case("", 16, num_tables=2, num_rows=300), 2, 2, tmp_path)
    copied, placed = (Plan.load(tmp_path / f"{name}.json").row_map for name in ("copied", "placed"))
    assert sorted(plans) == ["by_table", "copied", "elsewhere", "placed", "training"]
    assert not placed.copies.any() and copied.copies.any()
    on_host = copied.copies.reshape(-1, 2, 2).sum(2)
    assert (
        on_host == 2
    ).mean() < 0.1  # a neighbour's copy costs next to nothing, so a second one gains little


def test_ratios_are_those_of_the_rounds():
    times = {
        label: Times([[ms] * 3, [2 * ms] * 3], [1.0])
        for label, ms in ((OURS, 10.0), (topic.ALLTOALL, 25.0))
    }
    outcome = topic.Outcome("200mbit", times, {label: (1.5, 2.0) for label in times})
    row = topic.row_of(topic.Ground("zipf", 2, ("200mbit",)), outcome, OURS)
    assert (
        row["of_alltoall"] == pytest.approx(0.4)
        and row["of_torchrec"] is None
        and row["mb_per_host"] == 1.5
    )
    line = topic.headline(topic.Ground("zipf", 2, ("200mbit",)), outcome)
    assert "2.50 times as fast as alltoall, 1.50 MB" in line
