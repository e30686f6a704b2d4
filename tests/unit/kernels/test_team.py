import os
import signal
import threading
import time

import numpy as np
import pytest
import torch
from numba import njit, types
from numba.core.errors import TypingError

from pibroch.kernels import parallel, team

pytestmark = pytest.mark.skipif(
    os.environ.get("NUMBA_DISABLE_JIT") == "1" or not team.is_there(),
    reason="no team of torch's that kernels can enter",
)


@njit(nogil=True)
def fill(numbers, start, stop):
    """Writes the place of each number, and returns how many there were."""
    for i in range(start, stop):
        numbers[i] += i
    return stop - start


thread_id = types.ExternalFunction("pthread_self", types.uint64())


@njit(nogil=True)
def fill_and_sign(numbers, who, start, stop):
    """As ``fill``, and writes who did it."""
    for i in range(start, stop):
        numbers[i] += i
        who[i] = thread_id()


@njit(nogil=True)
def allocate(floats, start, stop):
    return len(np.empty(floats if start > 0 else 1))


@njit(nogil=True)
def halve(start, stop):
    return start / 2


@pytest.fixture(params=[2, 4])
def threads(request):
    torch.set_num_threads(request.param)
    return request.param


@pytest.mark.parametrize("num_ranges", [2, 4, 9])
def test_each_range_runs_once_whatever_the_number_of_threads(threads, num_ranges):
    numbers = np.zeros(1000, np.int64)
    bounds = [1000 * i // num_ranges for i in range(num_ranges + 1)]
    for _ in range(3):
        results = team.run(fill, bounds, numbers)
        assert results == np.diff(bounds).tolist()
    assert np.array_equal(numbers, 3 * np.arange(1000))


def test_kernels_are_torchs_threads_and_start_none_of_their_own(threads):
    torch.ones(500, 500) @ torch.ones(500, 500)
    before = set(os.listdir("/proc/self/task"))
    parallel.run(fill, 10_000, np.zeros(10_000, np.int64))
    assert set(os.listdir("/proc/self/task")) <= before  # one of another test's may end meanwhile
    product = torch.ones(500, 500) @ torch.ones(500, 500)
    assert (product == 500).all(), "and torch goes on with them"


def in_threads(work, count=1, name=None):
    """What ``work`` returns in each of some threads at once."""
    start = threading.Barrier(count)
    results = []

    def run():
        start.wait(60)
        results.append(work())

    threads = [threading.Thread(target=run, name=name and f"{name}-{i}") for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == count
    return results


def filled():
    numbers = np.zeros(10_000, np.int64)
    who = np.zeros(10_000, np.uint64)
    parallel.run(fill_and_sign, 10_000, numbers, who)
    assert np.array_equal(numbers, np.arange(10_000))
    return len(np.unique(who))


def test_any_thread_has_a_team_of_its_own(threads):
    assert filled() == threads
    assert in_threads(filled) == [threads]


def test_eight_threads_at_once_get_what_one_gets(threads):
    numbers = in_threads(lambda: [filled() for _ in range(50)], 8)
    assert {number for many in numbers for number in many} <= {1, threads}, (
        "each has its team, or works alone"
    )


def test_while_one_thread_has_its_team_another_works_alone(threads):
    with parallel._beside_main:
        assert in_threads(filled) == [1]
        assert filled() == threads, "the main thread waits for nobody"
    assert in_threads(filled) == [threads]


def test_teams_end_with_their_threads(threads):
    in_threads(filled)
    before = len(os.listdir("/proc/self/task"))
    for _ in range(5):
        in_threads(filled)
    deadline = time.monotonic() + 60
    while len(os.listdir("/proc/self/task")) > before and time.monotonic() < deadline:
        os.sched_yield()
    assert len(os.listdir("/proc/self/task")) <= before


@pytest.mark.parametrize("name", ["pibroch-communication", "rpc-worker0-worker"])
def test_our_own_threads_beside_a_trainer_have_none(threads, name):
    assert in_threads(lambda: team.can_run(fill), name=name) == [False]
    assert in_threads(filled, name=name)[0] >= 1  # right, by the standing threads


def test_a_process_forked_from_one_that_used_its_team_does_without(threads):
    parallel.run(fill, 10_000, np.zeros(10_000, np.int64))
    child = os.fork()
    if child == 0:
        numbers = np.zeros(10_000, np.int64)
        parallel.run(fill, 10_000, numbers)
        os._exit(int(team.can_run(fill) or not np.array_equal(numbers, np.arange(10_000))))
    deadline = time.monotonic() + 60
    ended = (0, 0)
    while ended[0] == 0 and time.monotonic() < deadline:
        ended = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0)


def test_a_kernel_without_memory_says_so(threads):
    assert team.run(allocate, [0, 1, 2], 1) == [1, 1]
    with pytest.raises(MemoryError, match="allocate"):
        team.run(allocate, [0, 1, 2], 1 << 60)
    assert team.run(allocate, [0, 1, 2], 1) == [1, 1]


def test_kernels_return_integers_or_nothing():
    with pytest.raises(TypingError, match="float64"):
        team.run(halve, [0, 1, 2])


def test_python_functions_have_no_team():
    assert not team.can_run(lambda start, stop: None)
