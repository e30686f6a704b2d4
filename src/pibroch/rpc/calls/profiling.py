"""Calls as events of torch's profiler, ``rpc_sync#name(caller -> callee)``, until their answer.

While no profiler is on there are only the calls. What the callee does is only in a profiler of its
own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.autograd.profiler import record_function

from pibroch.rpc.calls.agent import Agent
from pibroch.rpc.calls.futures import Future
from pibroch.rpc.info import WorkerInfo

_T = TypeVar("_T")
_is_on: Callable[[], bool] = torch._C._autograd._profiler_enabled  # of the calling thread


def key(kind: str, function: object, caller: WorkerInfo, callee: WorkerInfo) -> str:
    """An event's name; ``function`` is a function, or the name of a method."""
    name = function
    if not isinstance(function, str):
        name = torch.jit._builtins._find_builtin(function) or getattr(
            function, "__qualname__", repr(function)
        )
    return f"rpc_{kind}#{name}({caller.name} -> {callee.name})"


def sync_call(agent: Agent, to: WorkerInfo, function: object, call: Callable[[], _T]) -> _T:
    """Run ``call()`` as an event; returns its result."""
    if not _is_on():
        return call()
    with record_function(key("sync", function, agent.info, to)):
        return call()


def async_call(
    agent: Agent, to: WorkerInfo, function: object, call: Callable[[], Future]
) -> Future:
    """Run ``call()`` as an event; returns a future of its future's result.

    The event is over when that future is done.
    """
    if not _is_on():
        return call()
    result = agent.future()
    with record_function(key("async", function, agent.info, to)) as event:
        future = call()
        ended = event._call_end_callbacks_on_future(future)
        ended.add_done_callback(lambda _: result.follow(future))
    return result


def remote_call(agent: Agent, to: WorkerInfo, function: object, call: Callable[..., _T]) -> _T:
    """Run ``call(answered)`` as an event that ends when ``answered()`` is called."""
    if not _is_on():
        return call()
    done: torch.futures.Future[None] = torch.futures.Future()

    def answered() -> None:
        if not done.done():  # a creation that cannot be asked for fails twice
            done.set_result(None)

    with record_function(key("remote", function, agent.info, to)) as event:
        event._call_end_callbacks_on_future(done)
        return call(answered)
