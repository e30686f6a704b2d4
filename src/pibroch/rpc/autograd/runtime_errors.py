"""Errors of backward passes: a ``RuntimeError`` always, as in torch, and what they were as well."""

from __future__ import annotations

import functools
from typing import Any, cast

from pibroch.errors import RemoteError
from pibroch.rpc.info import WorkerInfo


def as_runtime_error(error: Exception, worker: WorkerInfo) -> Exception:
    """An error of the type of ``error`` that is a ``RuntimeError`` too and names the worker.

    >>> both = as_runtime_error(ValueError("a hook that fails"), WorkerInfo("worker1", 1))
    >>> isinstance(both, ValueError), isinstance(both, RuntimeError), str(both)
    (True, True, 'Error on Node 1: a hook that fails')
    """
    if isinstance(error, RuntimeError):
        return error
    message = f"Error on Node {worker.id}: {error}"
    try:
        both: Any = _as_both(cast(Any, type(error)))
        result: Exception = both.__new__(both, message)
        result.args = (message,)
        vars(result).update(vars(error))
        if str(error) not in str(result):
            raise TypeError("its str() does not show its message")
    except Exception:  # a type with a constructor, memory layout or str() of its own
        result = RemoteError(f"{message} ({type(error).__qualname__})")
    result.__cause__ = error.__cause__ or error
    return result


@functools.cache
def _as_both(kind: Any) -> object:
    return type(
        kind.__name__,
        (kind, RuntimeError),
        {"__module__": kind.__module__, "__qualname__": kind.__qualname__},
    )
