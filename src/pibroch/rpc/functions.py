"""``async_execution``, which marks functions that answer with a future's value."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from pibroch.errors import NotAllowedError
from pibroch.rpc.calls.agent import current_agent
from pibroch.wire.bounded_log import BoundedLog

log = logging.getLogger(__name__)
_failures_log = BoundedLog(log)

_F = TypeVar("_F", bound=Callable[..., Any])


def async_execution(fn: _F) -> _F:
    """Mark a function that returns a ``torch.futures.Future``: its value answers the caller.

    No thread waits for it. For functions, and for static and class methods as their inner
    decorator::

        @rpc.functions.async_execution
        def add_later(to, x, y):
            return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda done: done.wait() + 1)
    """

    @functools.wraps(fn)
    def wrapper(*args: object, **kwargs: object) -> Any:
        return fn(*args, **kwargs)

    wrapper._wrapped_async_rpc_function = wrapper  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]


def is_async(function: object) -> bool:
    """Whether a function was marked with ``async_execution``."""
    return hasattr(function, "_wrapped_async_rpc_function")


def is_future(value: object) -> bool:
    """Whether it is a future of torch, of any class (``then`` returns one of the base class)."""
    return isinstance(value, torch._C.Future)


def apply(function: Callable[..., object], args: object, kwargs: object) -> Any:
    """Call a function that arrived as a value: a pickle, as it has no name.

    Raises:
        NotAllowedError: where pickles are not allowed; a function with a name is called by it, with
            its checks.
    """
    if not current_agent().options.allow_pickle:
        raise NotAllowedError(
            "a function without a name",
            "one that is called by its name",
            "define it at module level",
        )
    return run(function, getattr(function, "__qualname__", repr(function)), args, kwargs)


def run(function: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
    """Call a function for another worker; logs what it raises.

    The result is a future if the function is marked with ``async_execution``, otherwise never.

    Raises:
        NotAllowedError: when an unmarked function returns a future.
        RuntimeError: when a marked one returns something else.
    """
    try:
        result = function(*args, **kwargs)
    except BaseException:
        _failures_log.write(
            logging.WARNING, "%s, which another worker called, raised", name, exc_info=True
        )
        raise
    if is_future(result) and not is_async(function) and function is not apply:
        raise NotAllowedError(
            f"a Future from {name} (Can not pickle torch.futures.Future)",
            "a value",
            "mark the function with rpc.functions.async_execution",
        )
    if is_async(function) and not is_future(result):
        raise RuntimeError(
            "Functions decorated with @rpc.async_function must return a torch.futures.Future"
            f" object, but {name}, decorated with @rpc.functions.async_execution, returned"
            f" {type(result)}"
        )
    return result
