"""The recursion that runs with bounded lag are compared with, and what the topic makes of times."""

import numpy as np
import pytest
from benchmarks.topics import bounded_lag

from pibroch.collectives.bounded_lag.max_plus import removed, total_time

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
    shares = removed({bound: total_time(DELAYS, bound) for bound in (0, *bounds)}, DELAYS, bounds)
    assert [shares[bound] for bound in bounds] == sorted(shares.values())
    assert shares[1] == pytest.approx(0.66, abs=0.06) and shares[8] == pytest.approx(0.93, abs=0.06)


def test_rows_say_how_much_of_the_gap_was_removed():
    drawn = DELAYS
    rows = [bounded_lag._delay_row("pibroch", bound, total_time(drawn, bound), drawn, drawn) for bound in (0, 8)]
    bounded_lag._add_removed(rows, drawn)
    assert rows[0]["removed_share"] == 0 and rows[1]["removed_share"] == pytest.approx(rows[1]["possible_share"])
    assert rows[1]["over_slept_ms"] == pytest.approx(0)
