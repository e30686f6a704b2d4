"""Joining, calling and leaving, with the names and semantics of ``torch.distributed.rpc``."""

from __future__ import annotations

import atexit
import operator
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from pibroch.errors import ConfigError, ProtocolError
from pibroch.host import is_loopback
from pibroch.rpc.autograd.engine import Autograd
from pibroch.rpc.calls import profiling
from pibroch.rpc.calls.agent import Agent, current_agent, is_initialized, set_current_agent
from pibroch.rpc.calls.departure import Departure
from pibroch.rpc.calls.futures import Future
from pibroch.rpc.functions import run
from pibroch.rpc.info import WorkerInfo, check_name
from pibroch.rpc.options import (
    DEFAULT_SHUTDOWN_TIMEOUT_S,
    UNSET_RPC_TIMEOUT,
    BackendType,
    RpcBackendOptions,
)
from pibroch.rpc.references.calls import References, call_of
from pibroch.rpc.rref import RRef
from pibroch.rpc.transport.membership import Rendezvous
from pibroch.rpc.values.callables import Callables, default_modules
from pibroch.rpc.values.messages import Call
from pibroch.wire.secret import find_secret

_T = TypeVar("_T")
_init_lock = threading.Lock()


def init_rpc(
    name: str,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Make this process a worker: ready to call others and to be called.

    Args:
        name: unique; letters, digits, underscore, colon and dash, shorter than 128 characters.
        backend: ``BackendType.PIBROCH``, the only one.
        rank: unique id of this worker; the one with rank 0 hosts the rendezvous.
        world_size: number of workers to wait for; absent for a group in which workers come and go.
        rpc_backend_options: everything else.

    Raises:
        RuntimeError: when this process is a worker already.
        ConfigError: for a name, address or secret that cannot be used.
        RpcTimeoutError: when not all workers join within the timeout of a call.
    """
    if backend is not None and not isinstance(backend, BackendType):
        raise TypeError("Argument backend must be a member of BackendType")
    if rpc_backend_options is not None and not isinstance(rpc_backend_options, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    check_name(name)
    options = rpc_backend_options or RpcBackendOptions()
    rank = operator.index(rank)
    world_size = None if world_size is None else operator.index(world_size)
    caller = sys._getframe(1).f_globals.get("__name__", "__main__")
    with _init_lock:
        if is_initialized():
            raise RuntimeError("RPC is already initialized")
        agent = _make_agent(name, rank, world_size, options, caller)
        set_current_agent(agent)  # others may call as soon as they see this worker
        try:
            agent.start()
        except BaseException:
            set_current_agent(None)
            raise


def _make_agent(
    name: str, rank: int, world_size: int | None, options: RpcBackendOptions, caller: str
) -> Agent:
    timeout_s = options.rpc_timeout or 24 * 3600.0
    rendezvous = Rendezvous(options.init_method, rank, world_size, timeout_s, options.store)
    if rendezvous.world_size and rendezvous.rank < 0:
        raise ConfigError(
            "no rank", "one from 0 on for each worker", "pass rank to init_rpc, or export RANK"
        )
    is_bound_here = options.bind is None or is_loopback(options.bind)
    on_one_machine = rendezvous.is_loopback and is_bound_here
    secret = find_secret(options.secret, os.environ, local=on_one_machine, key=rendezvous.key)
    callables = Callables(
        [*default_modules(caller), *options.allowed_modules],
        importable=options.allowed_modules,
        max_result_bytes=options.limits.message_bytes,
    )
    agent = Agent(name, rendezvous, options, callables, secret, RRef)
    agent.serve(Call, _run, in_pool=True)
    agent.packer.references = References(agent, RRef)
    agent.packer.recorder = Autograd(agent)
    agent.wait_to_leave = Departure(agent, rendezvous.world_size).wait
    return agent


def _run(origin: WorkerInfo, call: Call, value: object) -> object:
    """Handle a call: run the function that another worker names."""
    if not (
        isinstance(value, list)
        and len(value) == 2
        and isinstance(value[0], list)
        and isinstance(value[1], dict)
    ):
        raise ProtocolError(f"arguments of {call.function} that are none", "a list and a dict")
    args, kwargs = value
    del value
    return run(current_agent().callables.to_call(call.function), call.function, args, kwargs)


def rpc_sync(
    to: str | int | WorkerInfo,
    func: Callable[..., _T],
    args: Sequence[object] | None = None,
    kwargs: Mapping[str, object] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> _T:
    """Run ``func`` on worker ``to`` and return its value.

    Args:
        to: name, id or info of the callee.
        func: a function or class that callee and caller can name.
        args: positional arguments; tensors arrive as copies.
        kwargs: keyword arguments.
        timeout: in seconds; 0 for none; the options' by default.

    Raises:
        RpcTimeoutError: no answer in time.
        WorkerLostError: the callee ended or cannot be reached.
        NotAllowedError: for a function or value that may not be sent.
        Exception: what ``func`` raised, with its type and message.
    """
    agent = current_agent()
    name, value = call_of(agent, func, args, kwargs)
    callee = agent.find(to)
    result: _T = profiling.sync_call(
        agent,
        callee,
        func,
        lambda: agent.request_sync(callee, Call(name), value, timeout=timeout, in_context=True),
    )
    return result


def rpc_async(
    to: str | int | WorkerInfo,
    func: Callable[..., object],
    args: Sequence[object] | None = None,
    kwargs: Mapping[str, object] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future:
    """Run ``func`` on worker ``to``; returns at once a future of its value.

    Argument tensors must stay as they are until the future is done. Otherwise as ``rpc_sync``,
    whose errors the future raises.
    """
    agent = current_agent()
    name, value = call_of(agent, func, args, kwargs)
    callee = agent.find(to)
    return profiling.async_call(
        agent,
        callee,
        func,
        lambda: agent.request(callee, Call(name), value, timeout=timeout, in_context=True),
    )


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """The worker of this name; this worker when no name is given.

    Raises:
        UnknownWorkerError: when there is none.
    """
    agent = current_agent()
    return agent.info if worker_name is None else agent.find(worker_name)


def get_rpc_timeout() -> float:
    """The timeout of calls that have none of their own, in seconds; 0 for none."""
    return current_agent().options.rpc_timeout


def is_available() -> bool:
    """Whether this build has RPC: always, as in torch's builds that have it."""
    return True


def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT_S) -> None:
    """Leave the group.

    Args:
        graceful: first wait until all workers want to leave and nothing is under way any more (in a
            group without a ``world_size``: until this worker's own calls are done).
        timeout: for that, in seconds; 0 for none.

    Raises:
        WorkerLostError: a worker was lost before it arrived; this one has left nevertheless.
        RpcTimeoutError: not all arrived in time; likewise.
    """
    agent = current_agent()
    try:
        if graceful:
            agent.wait_to_leave(timeout or float("inf"))
    finally:
        set_current_agent(None)
        agent.close()


@atexit.register
def _leave_at_exit() -> None:
    """Leave when a program ends without ``shutdown``, so that others see it at once."""
    if is_initialized():
        shutdown(graceful=False)
