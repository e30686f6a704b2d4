"""Backward passes over all workers: the search for participants, their start, and failures.

Threads: searches and runs of the engine take long, so requests for them run on the pool; gradients
and aborts are handled on the loop, and only wake the threads that wait. ``Pass`` and ``Contexts``
have locks of their own.

An error of a pass is always a ``RuntimeError``, as in torch, and also of the type that it had.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from pibroch.errors import ProtocolError, RemoteError, RpcError
from pibroch.rpc.autograd.contexts import MAX_PASSES, Context, Contexts
from pibroch.rpc.autograd.discovery import Instruction, SearchRequest
from pibroch.rpc.autograd.messages import Abort, Discover, GradientsMessage, Start
from pibroch.rpc.autograd.passes import Pass, deadline_after, left_until
from pibroch.rpc.autograd.send_receive import Received
from pibroch.rpc.calls.agent import Agent
from pibroch.rpc.calls.futures import Waiter
from pibroch.rpc.calls.pending import OutcomeTo, Receiver
from pibroch.rpc.info import WorkerInfo


class Coordinator:
    """One worker's share in all backward passes, its own and those of others."""

    def __init__(self, agent: Agent, contexts: Contexts) -> None:
        self._agent = agent
        self._contexts = contexts
        agent.serve(Discover, self._on_discover, in_pool=True)
        agent.serve(Start, self._on_start, in_pool=True)
        agent.serve(GradientsMessage, self._on_gradients)
        agent.serve(Abort, self._on_abort)

    def run(
        self,
        context_id: int,
        roots: Sequence[Tensor],
        retain_graph: bool,
        timeout: float,
    ) -> None:
        """Accumulate the gradients of ``roots`` in the context, on all workers.

        See ``pibroch.rpc.autograd.backward``.
        """
        _check_roots(context_id, roots)
        context = self._contexts.get(context_id)
        number = next(self._agent.ids)
        part = self._pass(context, number, self._agent.info.id, self._agent.timeout_s(timeout))
        workers: frozenset[WorkerInfo] = frozenset()
        try:
            workers = self._search(part, roots)
            self._run_everywhere(part, roots, workers, retain_graph)
        except BaseException as error:
            for worker_id in part.partners | {worker.id for worker in workers}:
                self._send_abort(part, worker_id)
            if isinstance(error, Exception) and not isinstance(error, RuntimeError):
                raise as_runtime_error(error, self._agent.info) from error.__cause__ or error
            raise
        finally:
            context.passes.pop(number, None)

    def _pass(self, context: Context, number: int, root: int, timeout_s: float) -> Pass:
        """This worker's part in a pass, made when it is new."""
        if number not in context.passes and len(context.passes) >= MAX_PASSES:
            raise RpcError(
                f"{len(context.passes)} backward passes at once in a context",
                f"at most {MAX_PASSES}",
            )
        part = Pass(
            number, context, self._agent.info, root, self._send_gradients, self._agent.pool.waiting
        )
        part.deadline = deadline_after(timeout_s)
        return context.passes.setdefault(number, part)

    def _search(self, part: Pass, roots: Sequence[Tensor]) -> frozenset[WorkerInfo]:
        """Find the workers that take part."""
        answer = Waiter()
        self.perform(part, part.search(answer, roots))
        return _infos(answer.wait(self._agent.pool, left_until(part.deadline)))

    def _run_everywhere(
        self,
        part: Pass,
        roots: Sequence[Tensor],
        workers: frozenset[WorkerInfo],
        retain_graph: bool,
    ) -> None:
        others = [worker for worker in workers if worker.id != self._agent.info.id]
        part.num_others = len(others)
        for worker in others:
            timeout_s = left_until(part.deadline)
            start = Start(part.context.id, part.number, retain_graph, timeout_s)
            receiver = OutcomeTo(part.other_done, functools.partial(_abort, part, worker))
            self._agent.ask(receiver, worker, start, None, timeout_s)
        part.run(roots, retain_graph)
        part.await_others()

    def perform(self, part: Pass, instructions: Sequence[Instruction]) -> None:
        """Carry out the instructions of the search."""
        for instruction in instructions:
            if isinstance(instruction, SearchRequest):
                self._request(part, instruction)
                continue
            answer = cast(Receiver, instruction.requester)
            if instruction.error is not None:
                answer.fail(instruction.error)
            else:
                answer.succeed([(worker.name, worker.id) for worker in instruction.workers])

    def _request(self, part: Pass, request: SearchRequest) -> None:
        timeout_s = left_until(part.deadline)
        edges = [(edge.message, edge.tensor) for edge in request.edges]
        body = Discover(part.context.id, part.number, part.root, edges, timeout_s)
        receiver = OutcomeTo(
            functools.partial(self._answered, part), functools.partial(self._search_failed, part)
        )
        self._agent.ask(receiver, request.worker, body, None, timeout_s)

    def _answered(self, part: Pass, value: object) -> None:
        """Go on with the workers of the answer to a search."""
        try:
            workers = _infos(value)
        except (TypeError, ValueError):
            found = f"the answer {value!r:.100} to a search"
            self._search_failed(part, ProtocolError(found, "names and ids of workers"))
            return
        self.perform(part, part.answered(workers))

    def _search_failed(self, part: Pass, error: BaseException) -> None:
        assert isinstance(error, Exception)
        self.perform(part, part.failed(error))

    def _on_discover(
        self, origin: WorkerInfo, body: Discover, value: object
    ) -> torch.futures.Future[Any]:
        context = self._contexts.get(body.context)
        part = self._pass(context, body.backward, body.root, body.timeout_s)
        answer: torch.futures.Future[Any] = torch.futures.Future()
        requester = OutcomeTo(answer.set_result, answer.set_exception)
        self.perform(part, part.requested(requester, origin, body.edges))
        return answer

    def _on_start(self, origin: WorkerInfo, start: Start, value: object) -> None:
        context = self._contexts.get(start.context)
        part = context.passes.get(start.backward)
        if part is None:
            raise RpcError("the start of a backward pass that was given up", "one under way")
        part.deadline = deadline_after(start.timeout_s)
        try:
            part.run([], start.retain_graph)
        finally:
            context.passes.pop(start.backward, None)

    def _send_gradients(
        self, part: Pass, received: Received, gradients: list[Tensor | None]
    ) -> None:
        note = GradientsMessage(part.context.id, part.number, received.message)
        self._agent.notify(received.origin, note, gradients)

    def _on_gradients(self, origin: WorkerInfo, note: GradientsMessage, value: object) -> None:
        context = self._contexts.find(note.context)
        part = context.passes.get(note.backward) if context is not None else None
        if part is not None and isinstance(value, list):
            part.arrived(origin, note.message, value)

    # failures

    def _send_abort(self, part: Pass, worker_id: int) -> None:
        if worker_id == self._agent.info.id:
            return
        try:
            worker = self._agent.find(worker_id)
        except ValueError:
            return  # it left
        self._agent.notify(worker, Abort(part.context.id, part.number))

    def _on_abort(self, origin: WorkerInfo, note: Abort, value: object) -> None:
        context = self._contexts.find(note.context)
        part = context.passes.get(note.backward) if context is not None else None
        # the root learns of failures by its requests, with the cause
        if part is not None and part.root != self._agent.info.id:
            self._give_up(part, RpcError(f"a backward pass that worker {origin.name!r} gave up"))

    def _give_up(self, part: Pass, error: Exception) -> None:
        """End a pass here and at the workers that this one has to do with in it."""
        context = self._contexts.find(part.context.id)  # a closed one has none left
        if context is not None and context.passes.pop(part.number, None) is not None:
            part.abort(error)
            for worker_id in tuple(part.partners):
                self._send_abort(part, worker_id)

    def lost(self, worker: WorkerInfo, error: Exception) -> None:
        """Handle the loss of a worker: whatever waits for it raises ``error``."""
        for context in self._contexts.all():
            for part in tuple(context.passes.values()):
                if worker.id == part.root:
                    self._give_up(part, error)
                elif worker.id in part.partners:
                    part.abort(error)


def _infos(workers: Any) -> frozenset[WorkerInfo]:
    return frozenset(WorkerInfo(name, worker_id) for name, worker_id in workers)


def _abort(part: Pass, worker: WorkerInfo, error: BaseException) -> None:
    """End a pass with the error of another worker's part, which names the worker."""
    assert isinstance(error, Exception)
    part.abort(as_runtime_error(error, worker))


def _check_roots(context_id: object, roots: Sequence[Tensor]) -> None:
    is_list = isinstance(roots, (list, tuple)) and all(isinstance(root, Tensor) for root in roots)
    if type(context_id) is not int or not is_list:
        raise TypeError(
            f"got backward({type(context_id).__name__}, {type(roots).__name__}) (incompatible"
            " function arguments); need the id of a context and a list of tensors; do:"
            " backward(context_id, [loss])"
        )
    if not roots:
        raise RuntimeError(
            "got no roots (No tensors provided for gradient computation); need at least one; do:"
            " pass [loss]"
        )
    for root in roots:
        if not root.requires_grad:
            raise RuntimeError(
                "got a root that does not require a gradient (requires_grad not set on it); need"
                " one computed from tensors that have it"
            )
        if root.numel() != 1:
            raise RuntimeError(
                f"got a root of shape {tuple(root.shape)}, which is not a scalar, all roots need to"
                " be scalar; do: sum it up"
            )


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
