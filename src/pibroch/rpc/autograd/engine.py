"""Distributed autograd at one worker: its part in every message, and backward passes over all workers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from pibroch.errors import ProtocolError, RpcError, WorkerLostError
from pibroch.rpc.autograd.contexts import Context, Contexts
from pibroch.rpc.autograd.discovery import Ask, Instruction
from pibroch.rpc.autograd.gates import Received, Sent, make_gate, make_receipt
from pibroch.rpc.autograd.messages import Abort, Discover, Gradients, Graph, Release, Start
from pibroch.rpc.autograd.passes import Pass, deadline_after, left_until
from pibroch.rpc.info import WorkerInfo
from pibroch.rpc.options import UNSET_RPC_TIMEOUT

if TYPE_CHECKING:
    from pibroch.rpc.agent import Agent


class Autograd:
    """Contexts and backward passes of one agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._contexts = Contexts()
        # walks through graphs and runs of the engine take time: on the pool
        agent.serve(Discover, self._on_discover, in_pool=True)
        agent.serve(Start, self._on_start, in_pool=True)
        agent.serve(Gradients, self._on_gradients)
        agent.serve(Abort, self._on_abort)
        agent.serve(Release, self._on_release)
        agent.when_lost(self._on_lost)
        agent.when_closed(self.close)

    # messages

    def outgoing(self, context: int, to: WorkerInfo, tensors: list[Tensor]) -> tuple[Graph | None, list[Tensor]]:
        """A message of ``context`` leaves: gates behind its tensors that require gradients.

        Returns:
            the graph's part of the message, ``None`` when ``to`` needs none, and the tensors, detached.
        """
        known = self._contexts.find(context)
        detached = [tensor.detach() for tensor in tensors]
        if known is None:
            return None, detached
        needed = torch.is_grad_enabled()
        places = [place for place, tensor in enumerate(tensors) if needed and tensor.requires_grad]
        if not places and to in known.met:
            return None, detached
        known.met.add(to)
        message = next(self._agent.ids)
        if places:
            gates = {place: make_gate(message, place, tensors[place]) for place in places}
            known.sent[message] = Sent(message, to, next(known.orders), gates)
        return Graph(context, known.creator, message, tuple(places)), detached

    def incoming(self, origin: WorkerInfo, graph: object, tensors: list[Tensor]) -> list[Tensor]:
        """A message arrived: those of its tensors that require gradients at its sender require them here.

        Raises:
            ProtocolError: for a graph that does not fit the tensors.
        """
        try:
            part = msgspec.convert(graph, Graph)
        except msgspec.ValidationError as error:
            raise ProtocolError(
                f"a part of a graph that cannot be read ({error})", "one as in the wire format"
            ) from error
        context = self._contexts.open(part.context, part.creator)
        if context is None:
            return tensors
        context.met.add(origin)
        places = part.tensors
        if not places:
            return tensors
        if not _fits(places, tensors):
            raise ProtocolError(
                f"gradients for tensors {places}", f"different ones of {len(tensors)}, of floating type"
            )
        received = Received(part.message, origin, next(context.orders), places)
        chosen = [tensors[place] for place in places]
        if origin.id == self._agent.info.id:  # they still share the sender's memory, which its graph may need as it is
            chosen = [tensor.clone() for tensor in chosen]
        made = make_receipt(received, context.anchor, chosen)
        arrived = list(tensors)
        for place, tensor in zip(places, made, strict=True):
            arrived[place] = tensor
        return arrived

    def entered(self, context: int) -> AbstractContextManager[None]:
        """The calling thread works for ``context``."""
        return self._contexts.entered(context)

    def current_context(self) -> int | None:
        """The context that the calling thread is in."""
        return self._contexts.current

    # contexts

    def open(self) -> int:
        """A new context, whose creator is this worker."""
        context_id = next(self._agent.ids)
        self._contexts.open(context_id, (self._agent.info.id, self._agent.incarnation))
        return context_id

    def release(self, context: int) -> None:
        """Close a context here and, by and by, on all workers that it reached; those that are lost need nothing."""
        self._drop(
            context, RpcError("a backward pass in a closed context", "an open one", "leave the with block after it")
        )

    def check_open(self, context: int) -> None:
        """Raises ``RuntimeError`` when the context is not open here."""
        self._contexts.get(context)

    def gradients(self, context: int) -> dict[Tensor, Tensor]:
        """By leaf of this worker, the sum of its gradients.

        Raises:
            RuntimeError: when the context is not open here.
        """
        return self._contexts.get(context).gradients()

    def live_counts(self) -> dict[str, int]:
        """How much is kept: ``contexts``, ``gates``, ``passes``, ``buffers`` (gradients)."""
        contexts = self._contexts.all()
        passes = [each for context in contexts for each in tuple(context.passes.values())]
        return {
            "contexts": len(contexts),
            "gates": sum(len(sent.gates) for context in contexts for sent in tuple(context.sent.values())),
            "passes": len(passes),
            "buffers": sum(len(context.gradients()) for context in contexts) + sum(each.num_waiting for each in passes),
        }

    def close(self) -> None:
        """Forget everything; passes under way fail."""
        for context in self._contexts.all():
            self._contexts.close(context.id)
            _clear(context, RpcError("a backward pass on a worker that was shut down"))

    def _drop(self, context_id: int, error: Exception) -> None:
        context = self._contexts.close(context_id)
        if context is None:
            return
        _clear(context, error)
        for worker in tuple(context.met):
            if worker.id != self._agent.info.id:
                self._agent.notify(worker, Release(context_id))

    def _on_release(self, origin: WorkerInfo, release: Release, value: object) -> None:
        self.release(release.context)

    # backward

    def backward(
        self, context_id: int, roots: Sequence[Tensor], retain_graph: bool = False, timeout: float = UNSET_RPC_TIMEOUT
    ) -> None:
        """Accumulate the gradients of ``roots`` in the context, on all workers; see ``pibroch.rpc.autograd.backward``."""
        context = self._contexts.get(context_id)
        _check_roots(roots)
        number = next(self._agent.ids)
        part = self._pass(context, number, self._agent.info.id, self._agent.timeout_s(timeout))
        workers: frozenset[WorkerInfo] = frozenset()
        try:
            workers = self._search(part, roots)
            self._run_everywhere(part, roots, workers, retain_graph)
        except BaseException:
            for worker_id in part.partners | {worker.id for worker in workers}:
                self._tell_abort(part, worker_id)
            raise
        finally:
            context.passes.pop(number, None)

    def _pass(self, context: Context, number: int, root: int, timeout_s: float) -> Pass:
        """This worker's part in a pass."""
        made = Pass(number, context, self._agent.info, root, self._send_gradients, self._waiting)
        made.deadline = deadline_after(timeout_s)
        return context.passes.setdefault(number, made)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """While a thread of the pool is in here, another one may work in its stead."""
        token = self._agent.pool.begin_wait()
        try:
            yield
        finally:
            self._agent.pool.end_wait(token)

    def _search(self, part: Pass, roots: Sequence[Tensor]) -> frozenset[WorkerInfo]:
        """The workers that take part."""
        found: torch.futures.Future[list[tuple[str, int]]] = torch.futures.Future()
        self._perform(part, part.search(found, roots))
        return _infos(self._agent.wait(found, left_until(part.deadline)))

    def _run_everywhere(
        self, part: Pass, roots: Sequence[Tensor], workers: frozenset[WorkerInfo], retain_graph: bool
    ) -> None:
        others = [worker for worker in workers if worker.id != self._agent.info.id]
        rest = _Rest(part, len(others))
        for worker in others:
            timeout_s = left_until(part.deadline)
            start = Start(part.context.id, part.number, retain_graph, timeout_s)
            self._agent.request(worker, start, timeout=timeout_s).add_done_callback(rest.one_done)
        part.run(roots, retain_graph)
        self._agent.wait(rest.done, left_until(part.deadline))

    def _perform(self, part: Pass, instructions: Sequence[Instruction]) -> None:
        """Do what the search wants."""
        for instruction in instructions:
            if isinstance(instruction, Ask):
                self._ask(part, instruction)
                continue
            asker = instruction.asker
            assert isinstance(asker, torch.futures.Future)
            if instruction.error is not None:
                asker.set_exception(instruction.error)
            else:
                asker.set_result([(worker.name, worker.id) for worker in instruction.workers])

    def _ask(self, part: Pass, ask: Ask) -> None:
        timeout_s = left_until(part.deadline)
        edges = [(edge.message, edge.tensor) for edge in ask.edges]
        question = Discover(part.context.id, part.number, part.root, edges, timeout_s)
        future = self._agent.request(ask.worker, question, timeout=timeout_s)

        def answered(future: torch.futures.Future[Any]) -> None:
            try:
                workers = _infos(future.value())
            except Exception as error:
                self._perform(part, part.failed(error))
                return
            self._perform(part, part.answered(workers))

        future.add_done_callback(answered)

    def _on_discover(self, origin: WorkerInfo, question: Discover, value: object) -> torch.futures.Future[Any]:
        context = self._contexts.get(question.context)
        part = self._pass(context, question.backward, question.root, question.timeout_s)
        answer: torch.futures.Future[Any] = torch.futures.Future()
        self._perform(part, part.asked(answer, origin, question.edges))
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

    def _send_gradients(self, part: Pass, received: Received, gradients: list[Tensor | None]) -> None:
        note = Gradients(part.context.id, part.number, received.message)
        self._agent.notify(received.origin, note, gradients)

    def _on_gradients(self, origin: WorkerInfo, note: Gradients, value: Any) -> None:
        context = self._contexts.find(note.context)
        part = context.passes.get(note.backward) if context is not None else None
        if part is not None and isinstance(value, list):
            part.arrived(origin, note.message, value)

    # failures

    def _tell_abort(self, part: Pass, worker_id: int) -> None:
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
        if (
            part is not None and part.root != self._agent.info.id
        ):  # that one learns of failures by its requests, with their cause
            self._give_up(part, RpcError(f"a backward pass that worker {origin.name!r} gave up"))

    def _give_up(self, part: Pass, error: Exception) -> None:
        """End a pass here and with all that this worker brought into it."""
        if part.context.passes.pop(part.number, None) is not None:
            part.abort(error)
            for worker_id in tuple(part.partners):
                self._tell_abort(part, worker_id)

    def _on_lost(self, worker: WorkerInfo, incarnation: int) -> None:
        error = WorkerLostError(worker.name, "it was lost in the middle of distributed autograd")
        for context in self._contexts.all():
            if context.creator == (worker.id, incarnation):
                self._drop(context.id, error)
            for part in tuple(context.passes.values()):
                if worker.id == part.root:
                    self._give_up(part, error)
                elif worker.id in part.partners:
                    part.abort(error)


def _clear(context: Context, error: Exception) -> None:
    for part in tuple(context.passes.values()):
        part.abort(error)
    context.passes.clear()
    context.clear()


def _infos(workers: list[tuple[str, int]]) -> frozenset[WorkerInfo]:
    return frozenset(WorkerInfo(name, worker_id) for name, worker_id in workers)


def _fits(places: tuple[int, ...], tensors: list[Tensor]) -> bool:
    return len(set(places)) == len(places) and all(
        0 <= place < len(tensors) and (tensors[place].is_floating_point() or tensors[place].is_complex())
        for place in places
    )


class _Rest:
    """The other workers' parts in a pass: ``done`` when all are, or with the first error, which aborts ours."""

    def __init__(self, part: Pass, size: int) -> None:
        self.done: torch.futures.Future[Any] = torch.futures.Future()
        self._part, self._num_open = part, size
        self._lock = threading.Lock()
        if not size:
            self.done.set_result(None)

    def one_done(self, future: torch.futures.Future[Any]) -> None:
        """One has answered."""
        error = None
        try:
            future.value()
        except Exception as raised:
            error = raised
        with self._lock:
            self._num_open -= 1
            if self.done.done() or (error is None and self._num_open):
                return
            if error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(error)
        if error is not None:
            self._part.abort(error)


def _check_roots(roots: Sequence[Tensor]) -> None:
    if not roots:
        raise RuntimeError("got no roots; need at least one tensor to differentiate; do: pass [loss]")
    for root in roots:
        if not root.requires_grad:
            raise RuntimeError("got a root that does not require a gradient; need one computed from tensors that do")
        if root.numel() != 1:
            raise RuntimeError(f"got a root of shape {tuple(root.shape)}; need a scalar; do: sum it up first")
