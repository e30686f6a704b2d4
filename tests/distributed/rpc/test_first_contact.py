"""The first word between two workers.

One that is busy is waited for, and what cannot be opened does not end what is open.
"""

import contextlib
import os
import signal
import time

import msgspec
import pytest
from rpc_team import Team

from pibroch import rpc
from pibroch.errors import WorkerLostError
from pibroch.rpc.calls.agent import current_agent

LOST_AFTER_S = 1.0


def identity(value):
    return value


def outcome(to, timeout_s):
    """The value or the error of a call, and how long it took."""
    began = time.monotonic()
    try:
        result = rpc.rpc_sync(to, identity, (to,), timeout=timeout_s)
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    return result, time.monotonic() - began


@pytest.mark.parametrize("options", [{}, {"shared_memory": False}], ids=["unix", "tcp"])
def test_a_worker_that_does_not_answer_at_first_is_no_lost_one(options):
    team = Team(2, lost_after_s=LOST_AFTER_S, **options)
    try:
        team.workers[1].stop()
        error, seconds = team.run(0, outcome, "worker1", 1.5 * LOST_AFTER_S)
        assert error.startswith("RpcTimeoutError") and "'worker1'" in error, "lost, or not named"
        assert seconds >= 1.5 * LOST_AFTER_S
        os.kill(team.workers[1].pid, signal.SIGCONT)
        assert team.run(0, outcome, "worker1", 60.0)[0] == "worker1"
    finally:
        os.kill(team.workers[1].pid, signal.SIGCONT)
        team.close()


def fail_to_call_back(caller):
    """A call to the caller at an address where nobody listens."""
    membership = current_agent()._membership
    record = membership.find(caller)
    membership._records[caller] = msgspec.structs.replace(
        record, unix="nobody", port=1, host="127.0.0.1"
    )
    try:
        with pytest.raises(WorkerLostError, match="does not listen"):
            rpc.rpc_sync(caller, identity, (1,))
    finally:
        membership._records[caller] = record
    return "answered"


def call_who_fails_to_call_back():
    future = rpc.rpc_async("worker0", fail_to_call_back, ("worker1",))
    return future.wait(), rpc.rpc_sync("worker0", identity, (2,))


def test_a_connection_that_cannot_be_opened_does_not_end_one_that_is():
    with contextlib.closing(Team(2)) as team:
        assert team.run(1, call_who_fails_to_call_back) == ("answered", 2)
        assert team.run(0, outcome, "worker1", 60.0)[0] == "worker1"


def leave_within(timeout_s):
    try:
        rpc.shutdown(timeout=timeout_s)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(("stopped", "leaving"), [(1, 0), (1, 2), (0, 1)])
def test_a_stopped_worker_that_others_wait_for_in_vain_is_named(stopped, leaving):
    team = Team(3)
    try:
        team.workers[stopped].stop()
        error = team.run(leaving, leave_within, 1.0)
        assert error.startswith("RpcTimeoutError") and f"worker 'worker{stopped}'" in error
    finally:
        os.kill(team.workers[stopped].pid, signal.SIGKILL)
        team.close()
