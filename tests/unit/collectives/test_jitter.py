"""Which bound is chosen for which times, and who is called a straggler."""

import numpy as np
import pytest

from pibroch.collectives.bounded_lag.jitter import BOUNDS, choose_bound, find_straggler, total_time


def drawn(seed, high=0.01, shape=(64, 4)):
    return np.random.default_rng(seed).uniform(0, high, shape)


@pytest.mark.parametrize("seed", range(5))
def test_the_smallest_bound_that_is_nearly_as_good_as_the_largest(seed):
    times = drawn(seed)
    chosen = choose_bound(times)
    enough = 1.02 * total_time(times, 8)
    assert chosen >= 4 and total_time(times, chosen) <= enough
    assert all(total_time(times, bound) > enough for bound in BOUNDS if bound < chosen)


def test_one_is_enough_without_jitter_and_for_one_that_is_always_slow():
    assert choose_bound(0.005 + drawn(0, 0.0001)) == 1
    times = 0.001 + drawn(1, 0.0001)
    times[:, 2] += 0.02
    assert choose_bound(times) == 1 and choose_bound(drawn(0)[:, :1]) == 1


def test_a_rank_that_is_always_slow_is_found_whatever_jitter_is_beside():
    times = drawn(2)
    times[:, 1] += 0.006
    found = find_straggler(times)
    assert found.rank == 1 and found.seconds > 0.010 and found.next_seconds < 0.007


@pytest.mark.parametrize("seed", range(20))
def test_bad_luck_is_no_straggler(seed):
    assert find_straggler(drawn(seed)) is None
    times = np.full((64, 3), 0.005)
    times[30, 0] = 1.0
    assert find_straggler(times) is None and find_straggler(times[:, :1]) is None
