"""Calls on references: what the caller sends, and what the owner does."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pibroch.errors import NotAllowedError, ReferenceLostError, WorkerLostError
from pibroch.rpc import autograd
from pibroch.rpc.calls.agent import Agent
from pibroch.rpc.calls.futures import Future
from pibroch.rpc.calls.pending import OutcomeTo
from pibroch.rpc.functions import apply, run
from pibroch.rpc.info import WorkerInfo
from pibroch.rpc.references.call_messages import Backward, Create, Fetch, FunctionCall, MethodCall
from pibroch.rpc.references.messages import Peer
from pibroch.rpc.references.owned import OwnedValue, fill
from pibroch.rpc.references.runtime import Handle, ReferenceRuntime
from pibroch.rpc.references.user import Fork
from pibroch.rpc.values.methods import find_method


class References(ReferenceRuntime):
    """This worker's references, and the calls on them."""

    def __init__(self, agent: Agent, handles: type[Handle]) -> None:
        super().__init__(agent, handles)
        agent.serve(
            Create, self._on_create, in_pool=True, incarnation=lambda create: create.incarnation
        )
        agent.serve(MethodCall, self._on_method, in_pool=True)
        agent.serve(Backward, self._on_backward, in_pool=True)
        agent.serve(Fetch, self._on_fetch)

    # the caller's side

    def remote(
        self,
        owner: WorkerInfo,
        what: FunctionCall | MethodCall,
        value: list[Any],
        timeout: float,
        answered: Callable[[], None] = lambda: None,
        keeps: Handle | None = None,
    ) -> Any:
        """Request ``owner`` to create a value; returns a handle at once.

        When the owner has answered, ``answered()`` is called; ``keeps`` is kept alive until then.
        """
        agent = self.agent
        timeout_s = agent.timeout_s(timeout)
        held: OwnedValue | Fork
        if owner.id == agent.info.id:
            held = OwnedValue()
            reference = self.own(held)
            number = 0
        else:
            held = self.create(owner)
            reference = held.reference
            number = held.number

        def created(incarnation: object) -> None:
            answered()
            if not isinstance(incarnation, int):
                failed(RuntimeError(f"got {incarnation!r} from the owner; need its incarnation"))
            elif isinstance(held, Fork):  # else the value was set before the answer
                self.created(held, Peer(owner.id, incarnation))

        def failed(error: BaseException) -> None:
            assert isinstance(error, Exception)
            answered()
            if isinstance(held, Fork):
                owner_lives = not isinstance(error, WorkerLostError)
                self.creation_failed(held, error, owner_lives)
            else:
                held.fail(error)

        deadline = time.monotonic() + timeout_s if timeout_s else None
        rref = self.handles.of(self, owner, reference, held, deadline)
        body = Create(reference, number, agent.incarnation, what)
        # without a timeout, as the outcome at the owner matters; ``RRef`` checks the deadline when
        # it is used
        try:
            receiver = OutcomeTo(created, failed, keeps)
            agent.ask(receiver, owner, body, value, 0.0, in_context=True)
        except Exception as error:
            failed(error)
            raise
        return rref

    def fetch(self, rref: Handle, timeout: float) -> Any:
        """A copy of another worker's value; blocks until it is set."""
        try:
            return self.agent.request_sync(
                rref.owner(), Fetch(rref.place()), timeout=timeout, in_context=True
            )
        except WorkerLostError as error:
            raise lost(rref) from error

    def call(self, rref: Handle, method: str, value: list[Any], timeout: float) -> Any:
        """Call a method of the value at its owner; returns the result."""
        body = MethodCall(rref.place(), method)
        return self.agent.request_sync(rref.owner(), body, value, timeout=timeout, in_context=True)

    def call_async(self, rref: Handle, method: str, value: list[Any], timeout: float) -> Future:
        """As ``call``, but returns a future of the result."""
        body = MethodCall(rref.place(), method)
        future = self.agent.future()
        timeout_s = self.agent.timeout_s(timeout)
        # the value must not be dropped before the call on it is done
        receiver = OutcomeTo(future.succeed, future.fail, keeps=rref)
        self.agent.ask(receiver, rref.owner(), body, value, timeout_s, in_context=True)
        return future

    def call_remote(
        self,
        rref: Handle,
        method: str,
        value: list[Any],
        timeout: float,
        answered: Callable[[], None] = lambda: None,
    ) -> Any:
        """As ``call``, but returns a handle of the result, which stays at the owner."""
        what = MethodCall(rref.place(), method)
        return self.remote(rref.owner(), what, value, timeout, answered, rref)

    def backward(self, rref: Handle, context: int, retain_graph: bool) -> None:
        """Run a distributed backward pass with the value as its root, at its owner."""
        self.agent.request_sync(rref.owner(), Backward(rref.place(), context, retain_graph))

    # the owner's side

    def _on_create(self, origin: WorkerInfo, body: Create, value: list[Any]) -> int:
        owned = self.begin(body.reference, body.fork, Peer(origin.id, body.incarnation), origin)
        args, kwargs = value
        del value
        fill(owned, lambda: self._run(body.what, args, kwargs))
        return self.me.incarnation

    def _on_method(self, origin: WorkerInfo, body: MethodCall, value: list[Any]) -> Any:
        args, kwargs = value
        return self._run(body, args, kwargs)

    def _run(self, what: FunctionCall | MethodCall, args: object, kwargs: object) -> Any:
        callables = self.agent.callables
        if isinstance(what, FunctionCall):
            return run(callables.to_call(what.function), what.function, args, kwargs)
        value = self.value_at(what.place).wait(self.agent, 0.0)
        return run(find_method(value, what.method, callables), what.method, args, kwargs)

    def _on_fetch(self, origin: WorkerInfo, body: Fetch, value: object) -> object:
        owned = self.value_at(body.place, asker=origin.id)
        return owned.get() if owned.is_done else owned.future(self.agent)

    def _on_backward(self, origin: WorkerInfo, body: Backward, value: object) -> None:
        root = self.value_at(body.place).wait(self.agent, 0.0)
        run_backward(root, body.context, body.retain_graph)


def call_of(
    agent: Agent,
    function: object,
    args: Sequence[object] | None,
    kwargs: Mapping[str, object] | None,
) -> tuple[str, list[Any]]:
    """The name of a function, and ``[args, kwargs]``.

    A function without a name travels as a pickle, where pickles are allowed.
    """
    value: list[object] = [[*args] if args else [], dict(kwargs) if kwargs else {}]
    try:
        return agent.callables.name(function), value
    except NotAllowedError:
        if not agent.options.allow_pickle or not callable(function):
            raise
        return agent.callables.name(apply), [[function, *value], {}]


def run_backward(root: object, context: int, retain_graph: bool) -> None:
    """Run a backward pass from ``root``: local without a context (-1), else distributed.

    Raises:
        RuntimeError: when ``root`` is not a tensor.
    """
    if not isinstance(root, torch.Tensor):
        raise RuntimeError("RRef should contain a tensor for .backward()")
    if context == -1:
        torch.autograd.backward([root], retain_graph=retain_graph)
        return
    autograd.backward(context, [root], retain_graph)


def check_method_name(name: str) -> None:
    """Raise ``NotAllowedError`` for a private name; the owner checks further."""
    if name.startswith("__") and not name.endswith("__"):
        raise NotAllowedError(
            f"{name!r}, which is private", "names with one underscore at most", "make it public"
        )


def lost(rref: Handle) -> ReferenceLostError:
    """The error of a reference whose owner is lost."""
    return ReferenceLostError(
        f"{rref!r}, whose owner {rref.owner().name!r} is lost",
        "a living owner",
        "make the value again",
    )
