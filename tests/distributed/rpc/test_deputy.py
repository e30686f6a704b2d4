"""Functions that were short run on the network thread; one that is not, for once, must not hold up the others."""

import sys
import time

import pytest

from pibroch import rpc
from pibroch.errors import RemoteError

pytestmark = pytest.mark.timeout(120)
_sleep_s = 0.0
SLOW_S = 1.5
PATIENCE_S = 20.0


def sometimes_slow():
    if _sleep_s:
        time.sleep(_sleep_s)
    return True


def other():
    return "here"


def wait_for_me(caller):
    """Waits for another worker, on whatever thread it runs."""
    return rpc.rpc_sync(caller, other)


def exits():
    """Short, until it ends its thread."""
    if _sleep_s:
        sys.exit("on purpose")


def set_sleep(seconds):
    global _sleep_s
    _sleep_s = seconds


def hold_up_the_network_thread():
    for _ in range(50):
        rpc.rpc_sync("worker1", sometimes_slow)
        rpc.rpc_sync("worker1", other)
    rpc.rpc_sync("worker1", set_sleep, (SLOW_S,))
    slow = [rpc.rpc_async("worker1", sometimes_slow) for _ in range(3)]
    longest = 0.0
    for _ in range(50):
        began = time.monotonic()
        assert rpc.rpc_sync("worker1", other) == "here"
        longest = max(longest, time.monotonic() - began)
    assert not any(each.done() for each in slow)
    assert all(each.wait() for each in slow)
    rpc.rpc_sync("worker1", set_sleep, (0.0,))
    return longest


def call_each_other():
    for _ in range(200):
        assert rpc.rpc_sync("worker1", wait_for_me, ("worker0",)) == "here"
    futures = [rpc.rpc_async("worker1", wait_for_me, ("worker0",)) for _ in range(200)]
    return [each.wait() for each in futures] == ["here"] * 200


def call_what_exits():
    for seconds in (0.0, 1.0):
        rpc.rpc_sync("worker1", set_sleep, (seconds,))
        for _ in range(50):
            try:
                rpc.rpc_sync("worker1", exits, timeout=PATIENCE_S)
            except RemoteError as error:
                assert seconds and "on purpose" in str(error), error
            else:
                assert not seconds
    rpc.rpc_sync("worker1", set_sleep, (0.0,))
    return rpc.rpc_sync("worker1", other, timeout=PATIENCE_S)


def test_a_function_that_is_slow_for_once_holds_up_nobody(workers):
    assert workers(2).run(0, hold_up_the_network_thread) < SLOW_S / 3


def test_short_functions_that_wait_for_the_caller(workers):
    assert workers(2).run(0, call_each_other)


def test_a_function_that_exits_is_an_error_of_the_caller_and_the_network_thread_lives(workers):
    assert workers(2).run(0, call_what_exits) == "here"
