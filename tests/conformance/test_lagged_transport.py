"""What every transport of bounded lag keeps to, over two to four real processes."""

import os
import signal
import time
from importlib.util import find_spec
from pathlib import Path

import lagged_cases as cases
import pytest
from world import World

from pibroch.collectives.bounded_lag.opening import OPENERS
from pibroch.wire.alive import state_of

NUM_EXCHANGES = int(os.environ.get("PIBROCH_SOAK_EXCHANGES", "300"))
"""Of each case; 100,000 of them were run by hand, see design note 0013."""
MOST_GROWTH_BYTES = 1 << 20
SECONDS_TO_NOTICE = 5.0
SECONDS_STOPPED = 4.0

HAS_MPI = find_spec("mpi4py") is not None  # the extra `mpi`
needs_mpi = pytest.mark.skipif(not HAS_MPI, reason="mpi4py is not installed")
MPI = [needs_mpi, pytest.mark.alone]
"""Ranks of MPI do not sleep while they wait.

Three with other tests beside them on two cores take minutes.
"""
NAMES = [pytest.param(name, marks=MPI if name == "mpi" else ()) for name in (*OPENERS, "mixed")]
pytestmark = pytest.mark.parametrize("name", NAMES)


@pytest.mark.parametrize(("size", "bound"), [(2, 0), (2, 8), (3, 1), (4, 3)])
def test_every_part_arrives_as_it_was_sent(worlds, size, bound, name):
    grown = worlds(size).run(cases.exchanges, name, bound, NUM_EXCHANGES)
    if NUM_EXCHANGES >= 10_000:
        assert max(grown) <= MOST_GROWTH_BYTES


@pytest.mark.parametrize("size", [2, 3])
def test_parts_of_several_streams_are_seen_where_they_lie(worlds, size, name):
    assert worlds(size).run(cases.views, name) == [True] * size


def test_a_part_of_another_size_is_an_error(worlds, name):
    first, second = worlds(2).run(cases.wrong_size, name)
    assert "5 bytes from rank 1" in first and "6" in first and second is None


@pytest.mark.alone  # idle CPU
def test_who_waits_sleeps(worlds, name):
    assert worlds(2).run(cases.idle, name)[0] < 0.05


def test_a_rank_that_lives_and_sends_nothing_is_named_when_its_time_is_over(worlds, name):
    message, other = worlds(2).run(cases.wait_in_vain, name)
    assert "ranks [1]" in message and "0.5 s" in message and other is None


def test_closing_leaves_neither_descriptors_nor_threads(worlds, name):
    for before, after in worlds(2).run(cases.close, name):
        assert after == before


@pytest.mark.alone  # times
def test_a_rank_that_is_stopped_for_some_seconds_is_waited_for(name):
    world = World(2)
    pid = world._processes[1].pid
    try:
        world.ask(cases.stop_before_sending, name)
        deadline = time.monotonic() + 60
        while state_of(pid) != "T":
            assert time.monotonic() < deadline
        assert not world._pipes[0].poll(SECONDS_STOPPED)
        os.kill(pid, signal.SIGCONT)
        assert world.answer(0) == world.answer(1) == [1]
    finally:
        os.kill(pid, signal.SIGCONT)
        world.close()


@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.alone  # times, looks at /dev/shm
def test_a_rank_that_is_lost_is_named_by_all_others(how, name):
    before = set(os.listdir("/dev/shm"))
    world = World(3)
    victim = 2
    try:
        world.ask(cases.lose_a_peer, name, victim, how, SECONDS_STOPPED / 2)
        for rank in (0, 1):
            named, why, seconds = world.answer(rank)
            assert named == victim and seconds < SECONDS_TO_NOTICE, why
        assert set(os.listdir("/dev/shm")) <= before
    finally:
        for process in world._processes:
            if Path(f"/proc/{process.pid}").exists():
                os.kill(process.pid, signal.SIGCONT)
        world.close()
