import os
import signal
import threading
import time

import numpy as np
import pytest
import torch
from numba import njit
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
    numbers, bounds = np.zeros(1000, np.int64), [1000 * i // num_ranges for i in range(num_ranges + 1)]
    for _ in range(3):
        found = team.run(fill, bounds, numbers)
        assert found == np.diff(bounds).tolist()
    assert np.array_equal(numbers, 3 * np.arange(1000))


def test_kernels_are_torchs_threads_and_start_none_of_their_own(threads):
    torch.ones(500, 500) @ torch.ones(500, 500)
    before = len(os.listdir("/proc/self/task"))
    parallel.run(fill, 10_000, np.zeros(10_000, np.int64))
    assert len(os.listdir("/proc/self/task")) == before
    product = torch.ones(500, 500) @ torch.ones(500, 500)
    assert (product == 500).all(), "and torch goes on with them"


def test_another_thread_than_the_main_one_has_no_team(threads):
    numbers, found = np.zeros(10_000, np.int64), []

    def work():
        found.append(team.can_run(fill))
        parallel.run(fill, 10_000, numbers)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert found == [False] and team.can_run(fill)
    assert np.array_equal(numbers, np.arange(10_000))


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
