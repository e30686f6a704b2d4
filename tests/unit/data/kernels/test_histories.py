"""Histories of users against plain Python."""

import numpy as np
import pytest

from pibroch.data.kernels.histories import EMPTY_SLOT, histories
from pibroch.data.kernels.histories.naive import histories as naive


def state(most_users: int, most: int) -> tuple[np.ndarray, ...]:
    slots = np.full(1 << (2 * most_users).bit_length(), EMPTY_SLOT, np.int32)
    known = np.empty(most_users, np.uint64), np.zeros(1, np.int64), np.empty(most_users)
    rings = [np.full((most_users, most), 10**18, np.uint64) for _ in range(2)]
    return slots, *known, np.empty((most_users, 2), np.int64), *rings


def run(log, most, num_parts=1, part=0, kept=None, at_once=1000):
    kept = state(9, most) if kept is None else kept
    lengths = np.empty(len(log[0]), np.int64)
    out = np.zeros((len(lengths), most), np.uint64)
    for first in range(0, len(lengths), at_once):
        block = slice(first, first + at_once)
        columns = [column[block] for column in log]
        parts = np.uint64(num_parts), np.uint64(part)
        stopped = histories(*columns, *parts, *kept, lengths[block], out[block])
        assert stopped == -1
    return lengths, out


def random_log(seed, count=300):
    rng = np.random.default_rng(seed)
    users = rng.integers(0, 9, count).astype(np.uint64) << np.uint64(40)
    times = np.cumsum(rng.integers(0, 2, count)).astype(np.float64)
    items = rng.integers(0, 1 << 50, count).astype(np.uint64)
    return users, times, items, rng.random(count) < 0.7


@pytest.mark.parametrize("most", [1, 3, 40])
@pytest.mark.parametrize("at_once", [1, 7, 1000])
def test_histories_are_those_of_plain_python(most, at_once):
    log = random_log(most)
    lengths, out = run(log, most, at_once=at_once)
    got = [row[:length].tolist() for row, length in zip(out, lengths, strict=True)]
    assert got == naive(*log, most)
    assert max(lengths) == most or most == 40


def test_parts_of_users_have_all_records_between_them():
    log = random_log(5)
    log = (log[0] >> np.uint64(40), *log[1:])
    whole = run(log, 3)
    parts = [run(log, 3, num_parts=4, part=part) for part in range(4)]
    lengths = np.stack([lengths for lengths, _ in parts])
    assert np.array_equal(lengths.max(0), whole[0])
    assert np.array_equal((lengths >= 0).sum(0), np.ones(len(whole[0])))
    assert np.array_equal(sum(out for _, out in parts), whole[1])


def test_it_stops_at_a_user_too_many_and_where_time_goes_back():
    users = np.arange(10, dtype=np.uint64)
    times = np.zeros(10)
    items = users.copy()
    room = np.empty(10, np.int64), np.empty((10, 2), np.uint64)
    part = np.uint64(1), np.uint64(0)
    is_kept = np.ones(10, np.bool_)
    assert histories(users, times, items, is_kept, *part, *state(9, 2), *room) == 9
    users[3:] = users[0]
    times[6] = -1.0
    assert histories(users, times, items, is_kept, *part, *state(9, 2), *room) == -2 - 6
