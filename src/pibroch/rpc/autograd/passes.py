"""One backward pass at one worker: what takes part, gradients received, the run of the engine.

Threads: the engine runs in the thread of ``run``, which waits in ``await_turn`` for gradients of
other workers; ``arrived`` and ``abort`` run on the loop and wake it through ``_changed``, whose
lock guards all that changes. ``_walking`` is held for a walk through the graph, which may be long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from pibroch.errors import RpcTimeoutError
from pibroch.rpc.autograd import ddp
from pibroch.rpc.autograd.discovery import Discovery, Edge, Instruction
from pibroch.rpc.autograd.send_receive import Received, Sent, Walk, behind, run_engine, start_of
from pibroch.rpc.info import WorkerInfo

_YIELD_S = 0.0005

Gradients = list[Tensor | None]


def deadline_after(timeout_s: float) -> float | None:
    """A moment on the monotonic clock; ``None`` for no timeout, which is written 0."""
    return time.monotonic() + timeout_s if timeout_s > 0 else None


def left_until(deadline: float | None) -> float:
    """Seconds left, at least 0.001; 0 for no deadline."""
    return 0.0 if deadline is None else max(0.001, deadline - time.monotonic())


class Kept(Protocol):
    """The part of a context (``contexts.Context``) that a pass needs."""

    id: int
    anchor: Tensor
    sent: dict[int, Sent]

    def accumulate(self, gradients: dict[Tensor, Tensor]) -> None:
        """Add the gradients of a pass; the tensors then belong to the context."""


class Pass:
    """One backward pass at one worker; its methods may be called from any thread.

    Args:
        number: of the pass; the same on all workers, and unique.
        context: the context that it belongs to.
        me: this worker.
        root: id of the worker on which ``backward`` was called.
        send: called with the message received and its gradients, one or ``None`` for each tensor
            that requires them.
        waiting: entered while a thread waits for another worker.

    Attributes:
        partners: ids of the workers that this one exchanges messages with in this pass.
        deadline: on the monotonic clock.
        num_others: other workers whose parts are not done, at the root.
    """

    def __init__(
        self,
        number: int,
        context: Kept,
        me: WorkerInfo,
        root: int,
        send: Callable[[Pass, Received, Gradients], None],
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.number = number
        self.context = context
        self.root = root
        self.me = me
        self.partners: set[int] = {root}
        self.deadline: float | None = None
        self.num_others = 0
        self._send_message = send
        self._waiting = waiting
        self._discovery = Discovery(me)
        self._walk = Walk()
        self._places: dict[int, set[int]] = {}  # places of the tensors that take part, by message
        self._inbox: dict[int, dict[int, Tensor | None]] = {}
        self._unsent: list[Received] = []  # messages that the engine must still reach, newest last
        self._sent: set[int] = set()
        self._own: set[int] = set()  # addresses of memory of gradients that were sent or returned
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._walking = threading.Lock()

    @property
    def num_waiting(self) -> int:
        """The number of gradients that have arrived and were not used yet."""
        with self._changed:
            return sum(len(gradients) for gradients in self._inbox.values())

    # discovery

    def search(self, requester: object, roots: Iterable[Tensor]) -> list[Instruction]:
        """Start the search at the roots, on the worker where ``backward`` was called."""
        return self._go_on(requester, [start_of(root) for root in roots])

    def requested(
        self, requester: object, origin: WorkerInfo, edges: Iterable[tuple[int, int]]
    ) -> list[Instruction]:
        """Go on from the send functions of these tensors, (message, place).

        Raises:
            RuntimeError: for a tensor that was not sent to ``origin``.
        """
        starts: list[tuple[Node | None, int]] = []
        for message, place in edges:
            sent = self.context.sent.get(message)
            if sent is None or place not in sent.outputs or sent.to.id != origin.id:
                raise RuntimeError(
                    f"got gradients announced for message {message}, which worker {origin.name!r}"
                    " never had of this one"
                )
            self._places.setdefault(message, set()).add(place)
            starts += behind(sent.outputs[place])
        self.partners.add(origin.id)
        return self._go_on(requester, starts)

    def answered(self, workers: Iterable[WorkerInfo]) -> list[Instruction]:
        """Handle the answer to a search request."""
        with self._changed:
            return self._discovery.answered(workers)

    def failed(self, error: Exception) -> list[Instruction]:
        """Handle the failure of a search request."""
        with self._changed:
            return self._discovery.failed(error)

    def _go_on(
        self, requester: object, starts: Iterable[tuple[Node | None, int]]
    ) -> list[Instruction]:
        with self._walking:  # a lock of its own, so that answers and gradients need not wait
            reached = self._walk.go(starts)
        self.partners.update(received.origin.id for received, _ in reached)
        edges = [Edge(received.origin, received.message, place) for received, place in reached]
        with self._changed:
            return self._discovery.requested(requester, edges)

    # the run

    def run(self, roots: Sequence[Tensor], retain_graph: bool) -> None:
        """Run the engine once, and add the gradients of the leaves to the context.

        Raises:
            RpcTimeoutError: a gradient did not arrive in time.
            Exception: the error of ``abort``, or what a function or hook raised.
        """
        sent = sorted(
            (self.context.sent[message] for message in self._places), key=lambda each: each.order
        )
        sends = [
            (each, [each.outputs[place] for place in sorted(self._places[each.message])])
            for each in sent
        ]
        self._unsent = sorted(self._walk.received, key=lambda each: each.order)
        leaves = self._walk.leaves
        inputs = [*(GradientEdge(leaf, 0) for leaf in leaves), self.context.anchor]
        try:
            with ddp.leaf_gradients(self, leaves, shows=ddp.is_needed()) as gradients:
                run_engine(self, roots, sends, inputs, retain_graph)
        except Exception:
            self._check()
            raise
        self._check()
        self.context.accumulate({leaf: self._owned(each) for leaf, each in gradients.items()})

    def other_done(self, value: object) -> None:
        """Count the part of another worker as done."""
        with self._changed:
            self.num_others -= 1
            self._changed.notify_all()

    def await_others(self) -> None:
        """Wait until the parts of all other workers are done; raises as ``run``."""
        self._wait_until(
            lambda: not self.num_others, f"no end of the pass at {self.num_others} other workers"
        )

    def _wait_until(self, is_there: Callable[[], bool], missing: str) -> None:
        with self._waiting(), self._changed:
            while not is_there():
                self._check()
                if self.deadline is not None and time.monotonic() >= self.deadline:
                    raise RpcTimeoutError(
                        missing, "one in time", "raise the timeout, or see the other workers' logs"
                    )
                self._changed.wait(left_until(self.deadline) or None)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _owned(self, gradient: Tensor) -> Tensor:
        """The gradient, or a copy if its memory is shared with another gradient or a sent one."""
        parts = _parts(gradient)
        if any(_address(part) in self._own or not _fills_its_memory(part) for part in parts):
            return gradient.clone()
        self._own.update(map(_address, parts))
        return gradient

    def abort(self, error: Exception) -> None:
        """End the pass: whatever waits in it raises ``error``."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def arrived(self, origin: WorkerInfo, message: int, gradients: Gradients) -> None:
        """Take gradients of a message from its receiver; they may arrive before the run."""
        sent = self.context.sent.get(message)
        if sent is None or sent.to.id != origin.id or len(sent.outputs) != len(gradients):
            return
        with self._changed:
            self._inbox[message] = dict(zip(sent.outputs, gradients, strict=True))
            self._changed.notify_all()

    # called by the engine (``send_receive.RunningPass``)

    def await_turn(self, sent: Sent) -> None:
        """Wait until the gradients of a message have arrived."""
        self._let_newer_ones_finish(sent)
        with self._changed:
            if sent.message in self._inbox:
                return self._check()
        self._wait_until(
            lambda: sent.message in self._inbox, f"no gradient from worker {sent.to.name!r}"
        )

    def gradient(self, message: int, tensor: int) -> Tensor | None:
        """The gradient of one tensor of a message."""
        with self._changed:
            return self._inbox[message].pop(tensor)

    def send(self, received: Received, gradients: Sequence[Tensor | None]) -> None:
        """Send the gradients of a message to the worker that sent it, those that take part."""
        places = self._walk.received[received]
        to_send = [
            each if place in places else None
            for place, each in zip(received.tensors, gradients, strict=True)
        ]
        with self._changed:
            self._check()
            self._sent.add(received.message)
            self._own.update(
                _address(part) for each in to_send if each is not None for part in _parts(each)
            )
        self._send_message(self, received, to_send)

    def _let_newer_ones_finish(self, sent: Sent) -> None:
        """Wait for other devices, whose work may come before a turn.

        The engine takes a turn when the CPU has nothing else to do.
        """
        while self._has_newer(sent):
            device = (
                torch.accelerator.current_accelerator()
                if torch.accelerator.is_available()
                else None
            )
            assert device is not None, "the engine took a turn before what comes first"
            # a small pass through the device: the engine runs what is ready on the CPU meanwhile
            torch.zeros((), device=device, requires_grad=True).neg().backward()
            time.sleep(_YIELD_S)

    def _has_newer(self, sent: Sent) -> bool:
        with self._changed:
            self._check()
            while self._unsent and self._unsent[-1].message in self._sent:
                self._unsent.pop()
            return bool(self._unsent) and self._unsent[-1].order > sent.order


def _parts(gradient: Tensor) -> tuple[Tensor, ...]:
    """The strided tensors that a gradient consists of."""
    return (
        (gradient._indices(), gradient._values())
        if gradient.layout == torch.sparse_coo
        else (gradient,)
    )


def _address(part: Tensor) -> int:
    return part.untyped_storage().data_ptr()


def _fills_its_memory(part: Tensor) -> bool:
    return part.untyped_storage().nbytes() == part.numel() * part.element_size()
