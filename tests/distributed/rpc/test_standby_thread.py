"""Functions that were short run on the network thread.

One that is not, for once, must not hold up the others.
"""

import sys
import threading
import time

import pytest

from pibroch import rpc
from pibroch.errors import RemoteError

pytestmark = pytest.mark.timeout(120)
TIMEOUT_S = 60.0
_event = threading.Event()
_event.set()
_exits = False


def sometimes_slow():
    return _event.wait(TIMEOUT_S)


def other():
    return "here"


def wait_for_me(caller):
    """Waits for another worker, on whatever thread it runs."""
    return rpc.rpc_sync(caller, other)


def exits():
    """Short, until it ends its thread."""
    if _exits:
        sys.exit("on purpose")


def set_exits(exits):
    global _exits
    _exits = exits


def set_event(is_open):
    (_event.set if is_open else _event.clear)()


def hold_up_the_network_thread():
    for _ in range(50):
        rpc.rpc_sync("worker1", sometimes_slow)
        rpc.rpc_sync("worker1", other)
    rpc.rpc_sync("worker1", set_event, (False,))
    slow = [rpc.rpc_async("worker1", sometimes_slow) for _ in range(3)]
    began = time.monotonic()
    for _ in range(50):
        assert rpc.rpc_sync("worker1", other) == "here"
    took_s = time.monotonic() - began
    assert not any(each.done() for each in slow)
    rpc.rpc_sync("worker1", set_event, (True,))
    assert all(each.wait() for each in slow)
    return took_s


def call_each_other():
    for _ in range(200):
        assert rpc.rpc_sync("worker1", wait_for_me, ("worker0",)) == "here"
    futures = [rpc.rpc_async("worker1", wait_for_me, ("worker0",)) for _ in range(200)]
    return [each.wait() for each in futures] == ["here"] * 200


def call_what_exits():
    for may_exit in (False, True):
        rpc.rpc_sync("worker1", set_exits, (may_exit,))
        for _ in range(50):
            try:
                rpc.rpc_sync("worker1", exits, timeout=TIMEOUT_S)
            except RemoteError as error:
                assert may_exit and "on purpose" in str(error), error
            else:
                assert not may_exit
    rpc.rpc_sync("worker1", set_exits, (False,))
    return rpc.rpc_sync("worker1", other, timeout=TIMEOUT_S)


def test_a_function_that_is_slow_for_once_holds_up_nobody(workers):
    assert workers(2).run(0, hold_up_the_network_thread) < TIMEOUT_S / 4, (
        "until the gate opens nobody else would pass"
    )


def test_short_functions_that_wait_for_the_caller(workers):
    assert workers(2).run(0, call_each_other)


def test_a_function_that_exits_is_an_error_of_the_caller_and_the_network_thread_lives(workers):
    assert workers(2).run(0, call_what_exits) == "here"
