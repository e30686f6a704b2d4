"""Workers that die, hang, leave and come back; and what calls leave behind: nothing."""

import ctypes
import gc
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from rpc_team import Team

from pibroch import rpc
from pibroch.errors import RpcTimeoutError, WorkerLostError
from pibroch.rpc.options import DEFAULT_NUM_WORKER_THREADS

pytestmark = [pytest.mark.alone, pytest.mark.timeout(180)]  # alone: times, idle CPU, memory

LOST_WITHIN_S = 15.0
GIVEN_BACK_WITHIN_S = 30.0
# those of the pool, however busy the machine is, and the others
MOST_THREADS = DEFAULT_NUM_WORKER_THREADS + 4
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TRANSPORTS = {"shared memory": {}, "tcp": {"shared_memory": False}}


@pytest.fixture(params=TRANSPORTS)
def team(request):
    """Three workers that may be harmed."""
    made = Team(3, **TRANSPORTS[request.param])
    made.run_all(held)
    yield made
    for worker in made.workers:
        if worker.process.is_alive():
            os.kill(worker.pid, signal.SIGCONT)
    made.close()


def identity(value):
    return value


def add(x, y):
    return x + y


def sleep_forever():
    threading.Event().wait(120)


def die():
    os._exit(3)


pending: list = []


def call_a_sleeper(to, count):
    """Calls of all kinds that will not be answered.

    Returns once they were sent and another one was answered.
    """
    pending.extend(rpc.rpc_async(to, sleep_forever, timeout=0) for _ in range(count))
    pending.append(rpc.remote(to, sleep_forever, timeout=0))
    assert rpc.rpc_sync(to, add, (1, 1)) == 2


def fail_of_pending():
    """The errors' types and workers; each must come within the limit."""
    began = time.monotonic()
    errors = []
    for call in pending:
        try:
            call.wait() if hasattr(call, "wait") else call.to_here(timeout=LOST_WITHIN_S)
        except RuntimeError as error:
            errors.append((type(error).__name__, getattr(error, "worker", None)))
    pending.clear()
    return errors, time.monotonic() - began


def outcome(to, value=1, timeout=60.0):
    """What a call gives or raises, and how long it takes."""
    began = time.monotonic()
    try:
        result = rpc.rpc_sync(to, identity, (value,), timeout=timeout)
    except RuntimeError as error:
        result = type(error).__name__
    return result, time.monotonic() - began


def test_kill_of_a_callee_fails_its_calls_and_it_comes_back(team):
    for life in range(2):
        for caller in (0, 2):
            team.run(caller, call_a_sleeper, "worker1", 5)  # fewer than its threads
        team.workers[1].kill()
        for caller in (0, 2):
            errors, seconds = team.run(caller, fail_of_pending)
            assert {name for name, _ in errors} <= {"WorkerLostError", "ReferenceLostError"}
            assert errors.count(("WorkerLostError", "worker1")) >= 5 and len(errors) == 6
            assert seconds < LOST_WITHIN_S
            result, seconds = team.run(caller, outcome, "worker1")
            assert result == "WorkerLostError" and seconds < LOST_WITHIN_S
        assert team.run(0, outcome, "worker2", life)[0] == life, "the others go on"
        team.replace(1)
        assert team.run(0, outcome, "worker1", life)[0] == life
        assert team.run(2, outcome, "worker1", life)[0] == life
        assert team.run(1, outcome, "worker0", life)[0] == life


def test_a_callee_that_dies_in_a_function(team):
    assert team.run(0, call_die, "worker1") < LOST_WITHIN_S
    team.replace(1)
    assert team.run(0, outcome, "worker1", "back")[0] == "back"


def call_die(to):
    began = time.monotonic()
    with pytest.raises(WorkerLostError, match=to):
        rpc.rpc_sync(to, die)
    return time.monotonic() - began


def test_a_callee_that_hangs_costs_the_timeout_only(team):
    team.run(0, outcome, "worker1")
    team.workers[1].stop()
    result, seconds = team.run(0, outcome, "worker1", 1, 0.5)
    assert result == "RpcTimeoutError"
    assert 0.4 < seconds < LOST_WITHIN_S
    assert team.run(0, outcome, "worker2", 2)[0] == 2
    team.run(0, send_much, "worker1")
    os.kill(team.workers[1].pid, signal.SIGCONT)
    assert team.run(0, outcome, "worker1", 3)[0] == 3, "it was slow, not lost"


def send_much(to):
    """More than any buffer takes: the caller waits for its timeout, not for the network."""
    began = time.monotonic()
    future = rpc.rpc_async(to, identity, (torch.zeros(10_000_000),), timeout=0.5)
    with pytest.raises(RpcTimeoutError):
        future.wait()
    assert time.monotonic() - began < LOST_WITHIN_S


def test_kill_while_much_is_under_way_leaves_nothing(team):
    team.run(0, settle, "worker1")
    before = team.run(0, held)
    team.workers[1].stop()
    team.run(0, start_sending, "worker1")
    team.workers[1].kill()
    errors, seconds = team.run(0, fail_of_pending)
    assert errors == [("WorkerLostError", "worker1")] * 5 and seconds < LOST_WITHIN_S
    team.replace(1)
    team.run(0, settle, "worker1")
    most = {"bytes": before["bytes"] + (64 << 20), "descriptors": before["descriptors"] + 2}
    deadline = time.monotonic() + GIVEN_BACK_WITHIN_S
    while (over := what_exceeds(most, team.run(0, held))) and time.monotonic() < deadline:
        time.sleep(0.5)  # timers of the handshake still know the connection
    assert not over, before


def what_exceeds(most, now):
    return {name: value for name, value in now.items() if value > most[name]}


def start_sending(to):
    pending.extend(
        rpc.rpc_async(to, identity, (torch.zeros(5_000_000),), timeout=0) for _ in range(5)
    )


def settle(to):
    assert rpc.rpc_sync(to, identity, (torch.zeros(5_000_000),)).sum() == 0


def held():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what glibc keeps for later is not held
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES
    return {"descriptors": len(os.listdir("/proc/self/fd")), "bytes": resident}


def test_shutdown_with_a_lost_worker_ends(team):
    team.run(0, outcome, "worker1")
    team.run(2, outcome, "worker1")
    team.workers[1].kill()
    for caller in (0, 2):
        team.workers[caller].start(leave_without_one)
    for caller in (0, 2):
        assert team.workers[caller].result() < 2 * LOST_WITHIN_S


def leave_without_one():
    began = time.monotonic()
    with pytest.raises(WorkerLostError):
        rpc.shutdown()
    with pytest.raises(RuntimeError, match="initialized"):
        rpc.get_worker_info()
    return time.monotonic() - began


def test_who_leaves_alone_fails_its_calls_at_once(team):
    team.run(0, call_a_sleeper, "worker1", 3)
    team.run(1, leave_alone)
    errors, seconds = team.run(0, fail_of_pending)
    assert len(errors) == 4 and ("WorkerLostError", "worker1") in errors
    assert seconds < LOST_WITHIN_S
    assert team.run(0, outcome, "worker1")[0] == "WorkerLostError"


def leave_alone():
    began = time.monotonic()
    rpc.shutdown(graceful=False)
    return time.monotonic() - began


# what is left behind


def many_calls(to, count):
    """Calls of several kinds and sizes, up to 64 in flight."""
    small = torch.zeros(256)
    large = torch.zeros(1 << 18)
    in_flight = []
    for number in range(count):
        if number % 500 == 499:
            assert rpc.rpc_sync(to, identity, (large,)).shape == large.shape
        elif number % 100 == 99:
            with pytest.raises(TypeError):
                rpc.rpc_sync(to, add, (1, "1"))
        else:
            in_flight.append(
                rpc.rpc_async(to, identity, (small,) if number % 2 else ({"n": number},))
            )
        if len(in_flight) == 64:
            torch.futures.wait_all(in_flight)
            in_flight.clear()
    torch.futures.wait_all(in_flight)


def state():
    return held() | {"threads": threading.active_count(), "objects": len(gc.get_objects())}


@pytest.mark.slow
def test_memory_is_flat_over_a_hundred_thousand_calls(workers):
    team = workers(2)
    team.run_all(held)
    team.run(0, many_calls, "worker1", 10_000)
    before = team.run_all(state)
    team.run(0, many_calls, "worker1", 100_000)
    after = team.run_all(state)
    for earlier, later in zip(before, after, strict=True):
        assert later["bytes"] - earlier["bytes"] < 8 << 20, (before, after)
        assert later["objects"] - earlier["objects"] < 2_000, (before, after)
        assert later["threads"] <= max(earlier["threads"], MOST_THREADS), (before, after)
        assert later["descriptors"] - earlier["descriptors"] <= 4, (before, after)


def test_idle_workers_use_no_cpu(workers):
    team = workers(2)
    team.run_all(held)
    team.run(0, many_calls, "worker1", 100)
    team.run(1, many_calls, "worker0", 100)
    used_s = []
    for _ in range(5):  # one that spins does so each time
        before = team.run_all(time.process_time)
        time.sleep(1.0)  # what is measured
        after = team.run_all(time.process_time)
        used_s.append([later - earlier for earlier, later in zip(before, after, strict=True)])
        if max(used_s[-1]) < 0.010:
            return
    raise AssertionError(f"{used_s} s of CPU in a second each")
