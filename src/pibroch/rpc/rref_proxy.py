"""``rref.rpc_sync()``, ``rref.rpc_async()`` and ``rref.remote()``: objects whose methods run at the value's owner."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pibroch.rpc import profiling
from pibroch.rpc.rref_calls import check_method_name
from pibroch.rpc.rref_messages import MethodCall

if TYPE_CHECKING:
    from pibroch.rpc.rref import RRef


class _Proxy:
    """Turns ``proxy.method(...)`` into a call of the value's method at its owner.

    The owner decides which methods may be called (``methods.py``); private ones are refused here already.
    """

    def __init__(self, rref: RRef[Any], timeout: float) -> None:
        self._rref, self._timeout = rref, timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        check_method_name(name)
        rref, timeout, send, profiled = self._rref, self._timeout, self._send, self._profiled

        def method(*args: Any, **kwargs: Any) -> Any:
            rref.check_usable()
            value = [list(args), kwargs]
            if profiling.is_on():
                agent, owner = rref.references.agent, rref.owner()
                return profiled(agent, owner, name, lambda *rest: send(rref, name, value, timeout, *rest))
            return send(rref, name, value, timeout)

        return method

    _profiled: Callable[..., Any]

    @staticmethod
    def _send(rref: RRef[Any], name: str, value: list[Any], timeout: float, *rest: Any) -> Any:
        raise NotImplementedError


class SyncProxy(_Proxy):
    """Methods return the result."""

    _profiled = staticmethod(profiling.sync_call)

    @staticmethod
    def _send(rref: RRef[Any], name: str, value: list[Any], timeout: float, *rest: Any) -> Any:
        return rref.references.calls.call(rref, name, value, timeout)


class AsyncProxy(_Proxy):
    """Methods return a future of the result."""

    _profiled = staticmethod(profiling.async_call)

    @staticmethod
    def _send(rref: RRef[Any], name: str, value: list[Any], timeout: float, *rest: Any) -> Any:
        return rref.references.calls.call_async(rref, name, value, timeout)


class RemoteProxy(_Proxy):
    """Methods return a reference to the result."""

    _profiled = staticmethod(profiling.remote_call)

    @staticmethod
    def _send(rref: RRef[Any], name: str, value: list[Any], timeout: float, *rest: Any) -> Any:
        what = MethodCall(rref.place(), name)
        answered = rest[0] if rest else None
        return rref.references.calls.remote(rref.owner(), what, value, timeout, keeps=rref, answered=answered)
