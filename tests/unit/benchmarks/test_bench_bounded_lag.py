"""The recursion that runs with bounded lag are compared with, and what the topic makes of times."""

import time

import numpy as np
import pytest
from benchmarks import channel_section, lagged_data, lagged_sections
from benchmarks.topics import bounded_lag
from benchmarks.workers import lagged

from pibroch.collectives.bounded_lag.jitter import total_time

DELAYS = np.random.default_rng(3).uniform(0, 0.01, (400, 4))


def test_without_a_bound_the_slowest_rank_sets_the_pace_of_each_step():
    assert total_time(DELAYS, 0) == pytest.approx(DELAYS.max(1).sum())


def test_with_a_large_bound_the_slowest_rank_of_all_does():
    assert total_time(DELAYS, len(DELAYS)) == pytest.approx(DELAYS.sum(0).max())


def test_by_hand():
    delays = np.array([[4.0, 1.0], [1.0, 4.0], [1.0, 1.0]])
    assert [total_time(delays, bound) for bound in (0, 1, 2, 3)] == [9.0, 6.0, 6.0, 6.0]
    delays = np.array([[4.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    assert [total_time(delays, bound) for bound in (0, 1, 2, 3)] == [6.0, 5.0, 4.0, 4.0]


def test_each_unit_of_the_bound_removes_more_of_the_gap():
    bounds = (1, 2, 4, 8)
    synchronous = total_time(DELAYS, 0)
    gap = synchronous - DELAYS.sum(0).max()
    shares = {bound: (synchronous - total_time(DELAYS, bound)) / gap for bound in bounds}
    assert list(shares.values()) == sorted(shares.values())
    assert shares[1] == pytest.approx(0.66, abs=0.06) and shares[8] == pytest.approx(0.93, abs=0.06)


def test_rows_say_how_much_of_the_gap_was_removed():
    drawn = DELAYS
    rows = [
        bounded_lag._delay_row("pibroch", bound, total_time(drawn, bound), drawn, drawn)
        for bound in (0, 8)
    ]
    bounded_lag._add_removed(rows, drawn)
    assert rows[0]["removed_share"] == 0 and rows[1]["removed_share"] == pytest.approx(
        rows[1]["possible_share"]
    )
    assert rows[1]["over_slept_ms"] == pytest.approx(0)


@pytest.mark.parametrize(("name", "most"), [("plain", 1), ("sizes", 100)])
def test_cases_hold_what_they_say(tmp_path, name, most):
    path = lagged_data.write_case(name, tmp_path)
    with np.load(path) as arrays:
        assert arrays["lengths"].min() == 1 and arrays["lengths"].max() == most
        assert (
            arrays["lengths"].sum() == len(arrays["ids"])
            and arrays["ids"].max() < lagged_data.NUM_ROWS
        )
        assert arrays["dense"].shape[:2] == (arrays["lengths"].shape[0], arrays["lengths"].shape[2])
    assert lagged_data.write_case(name, tmp_path) == path


def test_samples_are_read_or_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("PIBROCH_TEST_DATA", str(tmp_path))
    assert (
        lagged_data.write_case("criteo", tmp_path) is None
        and lagged_data.write_case("avazu", tmp_path) is None
    )


def test_latency_and_throughput_of_runs_and_ranks():
    row = lagged_sections._row("plain", "pibroch", 4, [[0.010, 0.020], [0.010, 0.020]])
    assert row["latency_ms"] == pytest.approx(15) and row["batches_per_second"] == pytest.approx(
        150
    )
    assert row["half_interval_per_second"] == 0 and row["low"] < 15 < row["high"]


def test_a_time_chart_is_drawn(tmp_path):
    rows = [
        {"panel": f"k = {k}", "k": k, "rank": 0, "doing": "delay", "step_ms": 1.0} for k in (0, 4)
    ]
    spans = {k: [[("delay", 0.0, 1.0)]] * 4 for k in (0, 4)}
    lagged_sections.TimeChart(spans).draw(rows, "what", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_delay_is_never_shorter_than_drawn():
    for seconds in (0.0, 0.00005, 0.002):
        start = time.perf_counter()
        lagged._delay(seconds)
        assert time.perf_counter() - start >= seconds


def test_training_over_channels_is_compared_round_by_round():
    answers = [{"auto": [(0.1, 0.1), (0.4, 0.2)], "gloo": [(0.2, 0.3), (0.8, 0.6)]}] * 2
    ours, gloo = channel_section.channel_rows("small", 10, answers)
    assert (
        ours["ranks"] == 2
        and ours["gloo_over_this"] == pytest.approx(2)
        and gloo["gloo_over_this"] == 1
    )
    assert ours["cpu_ms"] == pytest.approx(30) and ours["gloo_cpu_over_this"] == pytest.approx(3)
