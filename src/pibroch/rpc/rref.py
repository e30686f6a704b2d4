"""``RRef``, a reference to a value on one worker, its owner; and ``remote``, which makes one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

from pibroch.errors import RpcTimeoutError, WorkerLostError
from pibroch.rpc.calls import profiling
from pibroch.rpc.calls.agent import current_agent, is_initialized
from pibroch.rpc.info import WorkerInfo
from pibroch.rpc.options import UNSET_RPC_TIMEOUT
from pibroch.rpc.references.call_messages import FunctionCall
from pibroch.rpc.references.calls import References, call_of, check_method_name, lost, run_backward
from pibroch.rpc.references.messages import ValuePlace
from pibroch.rpc.references.owned import OwnedValue
from pibroch.rpc.references.user import Fork, State
from pibroch.rpc.values.failures import copy_of

__all__ = ["RRef", "remote"]

_T = TypeVar("_T")


class RRef(Generic[_T]):
    """A reference to a value, which its owner keeps as long as there are references anywhere.

    ``RRef(value)`` refers to a value of this worker; ``remote`` and messages of other workers
    return references to their values. A reference can be among the arguments or in the result of a
    call, and can be used and sent at once.

    Args:
        value: the value that it refers to.
        type_hint: kept as an attribute, not used.

    Attributes:
        references: the worker's references of the group that this one belongs to.
    """

    __slots__ = (
        "__weakref__",
        "_deadline",
        "_fork",
        "_owned",
        "_owner",
        "_reference",
        "references",
        "type_hint",
    )

    def __init__(self, value: _T, type_hint: object = None) -> None:
        if not is_initialized():
            raise RuntimeError(
                "got an RRef before init_rpc (Current RPC agent is not set! Did you initialize the"
                " RPC framework?); need a worker that owns it; do: call init_rpc first"
            )
        references = _current_references()
        owned = OwnedValue()
        owned.succeed(value)
        self._refer(references, references.agent.info, references.own(owned), owned)
        self.type_hint = type_hint

    @classmethod
    def of(
        cls,
        references: References,
        owner: WorkerInfo,
        reference: int,
        held: OwnedValue | Fork,
        deadline: float | None = None,
    ) -> RRef[Any]:
        """A reference of this worker to its own value, which the table counts already, or a fork.

        ``deadline`` (monotonic, in seconds): until when the owner must have the value.
        """
        self = cls.__new__(cls)
        self._refer(references, owner, reference, held, deadline)
        return self

    def _refer(
        self,
        references: References,
        owner: WorkerInfo,
        reference: int,
        held: OwnedValue | Fork,
        deadline: float | None = None,
    ) -> None:
        self._fork = held if isinstance(held, Fork) else None
        self._owned = held if isinstance(held, OwnedValue) else None
        self._deadline = deadline
        self.type_hint = None
        self._owner = owner
        self._reference = reference
        self.references = references

    def __del__(self) -> None:
        references = getattr(self, "references", None)
        if references is not None:
            references.release(self._reference if self._fork is None else self._fork)

    def __repr__(self) -> str:
        if self._fork is None:
            return f"OwnerRRef({self._reference})"
        return f"UserRRef({self._reference}, fork={self._fork.number}, owner={self._owner.name!r})"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise RuntimeError(
            "Can not pickle rref in python pickler, rref can only be pickled when using RPC"
        )

    # the owner

    def owner(self) -> WorkerInfo:
        """The worker that has the value."""
        return self._owner

    def owner_name(self) -> str:
        """The owner's name."""
        return self._owner.name

    def is_owner(self) -> bool:
        """Whether this worker has the value."""
        return self._fork is None

    def confirmed_by_owner(self) -> bool:
        """Whether the owner has confirmed that it counts this reference; it can be used before."""
        return self._fork is None or self._fork.state is State.CONFIRMED

    # the value

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> _T:
        """The value itself at its owner, a copy on other workers; blocks until it is set.

        Raises:
            RpcTimeoutError: when it is not set in time (``timeout`` in seconds, 0 for none).
            ReferenceLostError: when the owner is lost.
            Exception: what making the value raised.
        """
        self.check_usable()
        if self._owned is not None:
            return self._wait_as_owner(timeout)
        value: _T = self.references.fetch(self, timeout)
        return value

    def local_value(self) -> _T:
        """The value, at its owner; blocks until it is set.

        Raises:
            RuntimeError: on another worker.
        """
        if self._owned is None:
            raise RuntimeError(
                f"For {self!r}, can't call localValue() on user {self.references.agent.info}. Call"
                f" it on owner {self._owner}"
            )
        self.check_usable()
        return self._wait_as_owner(0.0)

    def _wait_as_owner(self, timeout: float) -> _T:
        """Wait for the own value, at most until the deadline of ``remote``."""
        assert self._owned is not None
        if self._deadline is not None and not self._owned.is_done:
            left_s = max(0.001, self._deadline - time.monotonic())
            timeout_s = self.references.agent.timeout_s(timeout)
            if not timeout_s or left_s < timeout_s:
                self._owned.is_done_within(self.references.agent, left_s)
                self.check_usable()
        value: _T = self._owned.wait(self.references.agent, timeout)
        return value

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """``rref.rpc_sync().method(...)`` returns the result of the value's method at its owner."""
        return _Proxy(self, timeout, self.references.call, profiling.sync_call)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """``rref.rpc_async().method(...)`` returns a future of the result."""
        return _Proxy(self, timeout, self.references.call_async, profiling.async_call)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """``rref.remote().method(...)`` returns a reference to the result at the owner."""
        return _Proxy(self, timeout, self.references.call_remote, profiling.remote_call)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run a backward pass from the value, a scalar tensor, at its owner.

        Args:
            dist_autograd_ctx_id: id of the distributed autograd context; without it, which only the
                owner may do, the pass is local.
            retain_graph: keep the graph for another pass.

        Raises:
            RuntimeError: when the value is not a tensor, or the context is missing or unknown.
        """
        self.check_usable()
        context = -1 if dist_autograd_ctx_id is None else dist_autograd_ctx_id
        if self._fork is None:
            run_backward(self.local_value(), context, retain_graph)
        elif context == -1:
            raise RuntimeError("User RRefs require 'dist_autograd_ctx_id' to be specified")
        else:
            self.references.backward(self, context, retain_graph)

    # for the runtime

    def parts(self, references: References) -> tuple[Fork | None, int]:
        """The fork (``None`` at the owner) and the number of the value, for sending it.

        Raises:
            RuntimeError: when it belongs to another group.
        """
        if references is not self.references:
            self.references.check_open()
        self.check_usable()
        return self._fork, self._reference

    def place(self) -> ValuePlace:
        """The value that it refers to, for a message."""
        if self._fork is not None:
            return self._fork.place
        me = self.references.me
        return ValuePlace(self._reference, me, me, seen_by_owner=True)

    def check_usable(self) -> None:
        """Raise if the reference cannot be used any more.

        Raises:
            ReferenceLostError: the value is gone, or its owner is lost.
            RpcTimeoutError: the owner did not make the value within the timeout of ``remote``.
            RuntimeError: RPC was shut down since.
            Exception: the error of the request to make it.
        """
        self.references.check_open()
        fork = self._fork
        if fork is not None and fork.state is State.GONE:
            if fork.failure is None or isinstance(fork.failure, WorkerLostError):
                raise lost(self) from fork.failure
            raise copy_of(fork.failure)
        is_made = self.confirmed_by_owner() if self._owned is None else self._owned.is_done
        if self._deadline is not None and not is_made and time.monotonic() > self._deadline:
            raise RpcTimeoutError(
                f"{self!r}, which the owner has not made within the timeout of remote() (RRef"
                " creation timed out)",
                "it to be made in time",
                "raise the timeout, or see the owner's log",
            )


@dataclass(slots=True, eq=False, repr=False)
class _Proxy:
    """Turns ``proxy.method(...)`` into a call of the value's method at its owner.

    The owner decides which methods may be called (``values/methods.py``); private ones are refused
    before that.

    Args:
        _rref: refers to the value.
        _timeout: of the calls.
        _call: sends one: gets the reference, the method's name, its arguments, the timeout, and
            what ``_profiled`` adds.
        _profiled: makes it an event of the profiler (``calls/profiling.py``).
    """

    _rref: RRef[Any]
    _timeout: float
    _call: Callable[..., Any]
    _profiled: Callable[..., Any]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        check_method_name(name)

        def method(*args: object, **kwargs: object) -> Any:
            rref = self._rref
            rref.check_usable()
            value = [list(args), kwargs]
            return self._profiled(
                rref.references.agent,
                rref.owner(),
                name,
                lambda *more: self._call(rref, name, value, self._timeout, *more),
            )

        return method


def remote(
    to: str | int | WorkerInfo,
    func: Callable[..., _T],
    args: Sequence[object] | None = None,
    kwargs: Mapping[str, object] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[_T]:
    """Run ``func`` on worker ``to``, which keeps the result; returns a reference to it at once.

    Argument tensors must stay as they are until ``confirmed_by_owner()``.

    Args:
        to: name, id or info of the callee, which becomes the owner.
        func: a function or class that callee and caller can name.
        args: positional arguments.
        kwargs: keyword arguments.
        timeout: for ``func`` to be done, in seconds; 0 for none. When it is over, using the
            reference raises ``RpcTimeoutError``, as long as the owner has not answered.

    Raises:
        NotAllowedError: for a function or value that may not be sent. What ``func`` raises is
            raised by ``to_here``.
    """
    references = _current_references()
    agent = references.agent
    name, value = call_of(agent, func, args, kwargs)
    owner = agent.find(to)
    rref: RRef[_T] = profiling.remote_call(
        agent,
        owner,
        func,
        lambda *answered: references.remote(owner, FunctionCall(name), value, timeout, *answered),
    )
    return rref


def _current_references() -> References:
    references = current_agent().packer.references
    assert isinstance(references, References)
    return references
