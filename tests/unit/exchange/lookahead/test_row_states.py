"""State of the rows in the window alone.

The plans of state of all rows, in memory that does not know how many there are.
"""

import tracemalloc
from contextlib import contextmanager

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pibroch.exchange.lookahead.oracle import DESIGNS, Oracle
from pibroch.exchange.lookahead.oracle.encoding import encode
from pibroch.observability.memory import rss_bytes

MANY_ROWS = 240_000_000


def bits_of(answer):
    parts = encode(answer)
    return parts.head.tobytes(), parts.body.tobytes()


def check_same_plans(oracles, stream, lookahead, restart_at=None):
    """Both plan a stream of steps (addresses by rank) alike, which they get as in an exchange."""
    added = 0
    for step in range(len(stream)):
        while added < min(step + lookahead + 1, len(stream)):
            for oracle in oracles:
                oracle.add(stream[added])
            added += 1
        if step in (0, restart_at):
            if step:
                for oracle in oracles:
                    oracle.restart()
                    for rows in stream[step:added]:
                        oracle.add(rows)
            one, other = (oracle.open() for oracle in oracles)
            assert bits_of(one) == bits_of(other)
        one, other = (oracle.plan() for oracle in oracles)
        assert bits_of(one) == bits_of(other), step


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    num_ranks=st.integers(1, 4),
    num_servers=st.sampled_from([0, 2]),
    lookahead=st.sampled_from([1, 3, 30]),
    spare=st.sampled_from([0, 4, 1000]),
    design=st.sampled_from(sorted(DESIGNS)),
    restarts=st.booleans(),
    far=st.booleans(),
)
def test_plans_are_those_of_state_of_all_rows(
    seed, num_ranks, num_servers, lookahead, spare, design, restarts, far
):
    rng = np.random.default_rng(seed)
    num_rows = 200_000 if far else 150
    homes = np.linspace(0, num_rows, (num_servers or num_ranks) + 1).astype(np.int64)
    bounds = np.concatenate([np.zeros(num_ranks if num_servers else 0, np.int64), homes])
    sizes = rng.integers(0, 31, (20, num_ranks))
    stream = [
        [np.unique((rng.random(size) ** 3 * num_rows).astype(np.int64)) for size in of_step]
        for of_step in sizes
    ]
    capacity = max(len(np.unique(np.concatenate(rows))) for rows in stream) + spare
    rank = int(rng.integers(num_ranks))
    both = [
        Oracle(
            bounds,
            rank,
            lookahead,
            capacity,
            design,
            num_trainers=num_ranks,
            most_rows_in_full=most,
        )
        for most in (num_rows, 0)
    ]
    check_same_plans(both, stream, lookahead, 10 if restarts else None)


def test_plans_are_the_same_when_more_rows_come_than_there_was_room_for():
    rng = np.random.default_rng(3)
    num_rows = 3_000_000
    bounds = np.array([0, 1_000_000, 3_000_000])
    stream = [[np.unique(rng.integers(0, num_rows, 30_000)) for _ in range(2)] for _ in range(12)]
    both = [Oracle(bounds, 1, 5, num_rows, most_rows_in_full=most) for most in (num_rows, 0)]
    check_same_plans(both, stream, 5, restart_at=7)


@contextmanager
def allocated():
    """A function that returns the bytes allocated in the block, used or not, now and at most."""
    tracemalloc.start()
    try:
        yield tracemalloc.get_traced_memory
    finally:
        tracemalloc.stop()


def test_memory_is_that_of_the_window_however_many_rows_there_are():
    num_rows = MANY_ROWS
    rng = np.random.default_rng(1)
    lookahead = 4
    batch = 5_000
    bounds = np.array([0, 0, 0, num_rows // 2, num_rows])  # two trainers in front of two servers
    with allocated() as num_bytes:
        oracle = Oracle(bounds, 0, lookahead, 1_000_000, num_trainers=2)
        peaks = []
        for step in range(120):
            oracle.add([np.unique(rng.integers(0, num_rows, batch)) for _ in range(2)])
            if step == lookahead:
                oracle.open()
            if step >= lookahead:
                oracle.plan()
            peaks.append(num_bytes()[1])
    assert peaks[-1] < 24 << 20
    assert peaks[-1] - peaks[40] < 1 << 20, "rows that have left the window are still known"


def test_slots_that_are_never_used_take_no_memory():
    before = rss_bytes()
    oracle = Oracle(np.array([0, 0, MANY_ROWS]), 0, 1, MANY_ROWS, num_trainers=1)
    for first in (7, 70_000):
        oracle.add([np.arange(first, first + 50_000)])
    oracle.open()
    oracle.plan()
    assert rss_bytes() - before < 128 << 20
