"""Errors, losses and timeouts in the middle of a backward pass.

An error at the caller, nothing left anywhere.
"""

import threading
import time

import pytest
import torch
from autograd_cases import live_counts, scaled, weight
from rpc_team import Team

from pibroch import rpc
from pibroch.errors import RpcTimeoutError, WorkerLostError
from pibroch.rpc import autograd

pytestmark = pytest.mark.timeout(120)
_block = threading.Event()
_reached = threading.Event()


@pytest.fixture
def own_team():
    team = Team(3, rpc_timeout=20.0, shared_memory=True)
    yield team
    team.close()


def _raise(gradient):
    raise ValueError("a hook that fails")


def failing(x, to):
    """On one worker a hook fails; the graph goes on to ``to`` and back."""
    y = rpc.rpc_sync(to, scaled, (x, "f", 0))
    y.register_hook(_raise)
    return y * 2


def blocking(x, to):
    """On one worker a hook blocks in the middle of the pass."""
    y = rpc.rpc_sync(to, scaled, (x, "f", 0)) if to else x * 1
    y.register_hook(_wait)
    return y * 2


def _wait(gradient):
    _reached.set()
    _block.wait(30)


def unblock():
    _block.set()


def wait_reached():
    assert _reached.wait(30)


def error_on_another_worker():
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with autograd.context() as context:
        loss = rpc.rpc_sync("worker1", failing, (x.sin(), "worker2")).sum()
        with pytest.raises(ValueError, match="a hook that fails") as caught:
            autograd.backward(context, [loss])
        assert "worker1" in str(caught.value.__cause__)
        assert x not in autograd.get_gradients(context)


def failing_next(to):
    """The hook fails at ``to``, for whose gradient this worker waits; the caller does not."""
    return rpc.rpc_sync(to, fails_here, (weight("f", 1) * 2,))


def fails_here(x):
    y = x * 2
    y.register_hook(_raise)
    return y


def error_where_the_caller_does_not_wait():
    for others in (("worker1", "worker2"), ("worker2", "worker1")):
        with autograd.context() as context:
            loss = rpc.rpc_sync(others[0], failing_next, (others[1],)).sum()
            begin = time.monotonic()
            with pytest.raises(ValueError, match="a hook that fails"):
                autograd.backward(context, [loss])
            assert time.monotonic() - begin < 10


def error_here():
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with autograd.context() as context:
        y = x * 2
        y.register_hook(_raise)
        loss = rpc.rpc_sync("worker1", scaled, (y, "w", 1)).sum()
        with pytest.raises(ValueError, match="a hook that fails"):
            autograd.backward(context, [loss])


def lost_in_the_middle():
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with autograd.context() as context:
        loss = rpc.rpc_sync("worker1", blocking, (x.sin(), "worker2")).sum()
        begin = time.monotonic()
        with pytest.raises(WorkerLostError, match="worker1"):
            autograd.backward(context, [loss])
        assert time.monotonic() - begin < 15
        other = rpc.rpc_sync("worker2", scaled, (x, "w", 2)).sum()
        autograd.backward(context, [other])  # the others go on
        assert autograd.get_gradients(context)[x].tolist() == weight("w", 2).tolist()


def lost_before():
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with autograd.context() as context:
        loss = rpc.rpc_sync("worker1", scaled, (x, "w", 1)).sum()
        yield context
        with pytest.raises(WorkerLostError, match="worker1"):
            autograd.backward(context, [loss])


_parts: list = []


def begin_lost_before():
    _parts.append(lost_before())
    next(_parts[0])


def end_lost_before():
    assert next(_parts.pop(), None) is None


def times_out():
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with autograd.context() as context:
        loss = rpc.rpc_sync("worker1", blocking, (x.sin(), None)).sum()
        begin = time.monotonic()
        with pytest.raises(RpcTimeoutError):
            autograd.backward(context, [loss], timeout=0.5)
        assert 0.4 < time.monotonic() - begin < 15


def is_the_root():
    """``backward`` here, with a worker that blocks; this one will be killed."""
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with autograd.context() as context:
        y = rpc.rpc_sync("worker1", scaled, (x.sin(), "w", 1))
        z = rpc.rpc_sync("worker2", relayed, (y,))
        z.register_hook(_wait)
        autograd.backward(context, [z.sum()])


def relayed(x):
    return rpc.rpc_sync("worker1", scaled, (x, "w", 1)) * 2


def test_error_on_another_worker(workers):
    team = workers(3)
    team.run(0, error_on_another_worker)
    team.run(0, error_here)
    team.run(0, error_where_the_caller_does_not_wait)
    gone(team)


def test_a_worker_killed_in_the_middle(own_team):
    own_team.workers[0].start(lost_in_the_middle)
    own_team.run(1, wait_reached)
    own_team.workers[1].kill()
    own_team.workers[0].result(60)
    gone(own_team, 0, 2)


def test_a_worker_killed_before(own_team):
    own_team.run(0, begin_lost_before)
    own_team.workers[1].kill()
    own_team.run(0, end_lost_before)
    gone(own_team, 0, 2)


def test_the_caller_killed_in_the_middle(own_team):
    """What it opened is dropped by all, also by those that only others reached."""
    own_team.workers[0].start(is_the_root)
    time_limit = time.monotonic() + 60
    while not all(own_team.run(each, live_counts)["passes"] for each in (1, 2)):
        assert time.monotonic() < time_limit
    own_team.workers[0].kill()
    gone(own_team, 1, 2)


def test_timeout(own_team):
    own_team.run(0, times_out)
    own_team.run(1, unblock)
    gone(own_team, 0, 1, 2)


def gone(team, *ranks):
    deadline = time.monotonic() + 60
    while any(any(team.run(rank, live_counts).values()) for rank in ranks or range(team.size)):
        assert time.monotonic() < deadline, [
            team.run(rank, live_counts) for rank in ranks or range(team.size)
        ]
