"""One backward pass at one worker.

What takes part here, the gradients that have come, and the run of the engine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from pibroch.errors import RpcTimeoutError
from pibroch.rpc.autograd import ddp
from pibroch.rpc.autograd.discovery import Discovery, Edge, Instruction
from pibroch.rpc.autograd.gates import Received, Sent, Walk, behind, run_engine, start_of
from pibroch.rpc.info import WorkerInfo

_YIELD_S = 0.0005

Gradients = list[Tensor | None]


def deadline_after(timeout_s: float) -> float | None:
    """A moment on the monotonic clock; ``None`` for no timeout, which is written 0."""
    return time.monotonic() + timeout_s if timeout_s > 0 else None


def left_until(deadline: float | None) -> float:
    """Seconds left, at least a little; 0 for no deadline."""
    return 0.0 if deadline is None else max(0.001, deadline - time.monotonic())


class Kept(Protocol):
    """What a worker keeps of a context (``contexts.Context``), as far as a pass needs it."""

    id: int
    anchor: Tensor
    sent: dict[int, Sent]

    def accumulate(self, gradients: dict[Tensor, Tensor]) -> None:
        """Add the outcome of a pass; takes over the tensors."""


class Pass:
    """One backward pass at one worker. Its methods may be called from any thread.

    Args:
        number: unique; the same on all workers.
        context: the context that it belongs to.
        me: this worker.
        root: id of the worker on which ``backward`` was called.
        send: called with the message received and its gradients, one or ``None`` for each tensor
            that requires them.
        waiting: entered while a thread waits for another worker.

    Attributes:
        partners: ids of the workers with which this one has to do in this pass.
        deadline: on the monotonic clock.
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
        self._post = send
        self._waiting = waiting
        self._discovery = Discovery(me)
        self._walk = Walk()
        self._gates: dict[int, set[int]] = {}  # places of the tensors that take part, by message
        self._inbox: dict[int, dict[int, Tensor | None]] = {}
        self._unsent: list[Received] = []  # what the engine has yet to reach, the newest last
        self._sent: set[int] = set()
        self._own: set[int] = set()  # addresses of memory that nobody else holds
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._walking = threading.Lock()

    @property
    def num_waiting(self) -> int:
        """Gradients that have come and were not used yet."""
        with self._changed:
            return sum(len(gradients) for gradients in self._inbox.values())

    # discovery

    def search(self, asker: object, roots: Iterable[Tensor]) -> list[Instruction]:
        """Start at the roots, as the worker on which ``backward`` was called."""
        return self._go_on(asker, [start_of(root) for root in roots])

    def asked(
        self, asker: object, origin: WorkerInfo, edges: Iterable[tuple[int, int]]
    ) -> list[Instruction]:
        """Go on from the gates of these tensors, (message, place).

        Raises:
            RuntimeError: for a message that is not known.
        """
        starts: list[tuple[Node | None, int]] = []
        for message, place in edges:
            sent = self.context.sent.get(message)
            if sent is None or place not in sent.gates or sent.to.id != origin.id:
                raise RuntimeError(
                    f"got gradients announced for message {message}, which worker {origin.name!r}"
                    " never had of this one"
                )
            self._gates.setdefault(message, set()).add(place)
            starts += behind(sent.gates[place])
        self.partners.add(origin.id)
        return self._go_on(asker, starts)

    def answered(self, workers: Iterable[WorkerInfo]) -> list[Instruction]:
        """One that was asked has answered."""
        with self._changed:
            return self._discovery.answered(workers)

    def failed(self, error: Exception) -> list[Instruction]:
        """One that was asked failed."""
        with self._changed:
            return self._discovery.failed(error)

    def _go_on(self, asker: object, starts: Iterable[tuple[Node | None, int]]) -> list[Instruction]:
        with self._walking:  # takes time, which answers and gradients need not wait for
            found = self._walk.go(starts)
        self.partners.update(received.origin.id for received, _ in found)
        with self._changed:
            return self._discovery.asked(
                asker, [Edge(received.origin, received.message, place) for received, place in found]
            )

    # the run

    def run(self, roots: Sequence[Tensor], retain_graph: bool) -> None:
        """Run the engine once, and add the gradients of the leaves to the context.

        Raises:
            RpcTimeoutError: a gradient did not come in time.
            Exception: what ``abort`` was given, or a function or hook raised.
        """
        sent = sorted(
            (self.context.sent[message] for message in self._gates), key=lambda each: each.order
        )
        gates = [
            (each, [each.gates[place] for place in sorted(self._gates[each.message])])
            for each in sent
        ]
        self._unsent = sorted(self._walk.receipts, key=lambda each: each.order)
        leaves = self._walk.leaves
        try:
            gradients = self._gradients(roots, gates, leaves, retain_graph)
        except Exception:
            self._check()
            raise
        self._check()
        pairs = zip([cast(Any, leaf).variable for leaf in leaves], gradients, strict=False)
        self.context.accumulate(
            {leaf: self._owned(each) for leaf, each in pairs if each is not None}
        )

    def _gradients(
        self,
        roots: Sequence[Tensor],
        gates: Sequence[tuple[Sent, list[Tensor]]],
        leaves: Sequence[Node],
        retain_graph: bool,
    ) -> Sequence[Tensor | None]:
        inputs = [*(GradientEdge(leaf, 0) for leaf in leaves), self.context.anchor]
        with ddp.LeafGradients(self, leaves, shows=ddp.is_needed()) as seen:
            run_engine(self, roots, gates, inputs, retain_graph)
        return seen.gradients()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _owned(self, gradient: Tensor) -> Tensor:
        """The gradient, or a copy when its memory belongs to another one too, or to one that was sent."""
        parts = _parts(gradient)
        if any(_address(part) in self._own or not _fills_its_memory(part) for part in parts):
            return _copied(gradient)
        self._own.update(map(_address, parts))
        return gradient

    def abort(self, error: Exception) -> None:
        """Whoever waits in this pass raises ``error``."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def arrived(self, origin: WorkerInfo, message: int, gradients: Gradients) -> None:
        """Gradients of a message came from its receiver, perhaps before the run."""
        sent = self.context.sent.get(message)
        if sent is None or sent.to.id != origin.id or len(sent.gates) != len(gradients):
            return
        with self._changed:
            self._inbox[message] = dict(zip(sent.gates, gradients, strict=True))
            self._changed.notify_all()

    # called by the engine (gates.Backward)

    def await_turn(self, sent: Sent) -> None:
        """Wait until the gradients of a message are there."""
        self._let_newer_ones_finish(sent)
        with self._changed:
            if sent.message in self._inbox:
                return self._check()
        with self._waiting(), self._changed:
            while sent.message not in self._inbox and self._error is None:
                left = left_until(self.deadline)
                if self.deadline is not None and time.monotonic() >= self.deadline:
                    raise RpcTimeoutError(
                        f"no gradient from worker {sent.to.name!r}",
                        "one in time",
                        "raise the timeout, or see that worker",
                    )
                self._changed.wait(left or None)
            self._check()

    def gradient(self, message: int, tensor: int) -> Tensor | None:
        """The gradient of one tensor of a message."""
        with self._changed:
            return self._inbox[message].pop(tensor)

    def send(self, received: Received, gradients: Sequence[Tensor | None]) -> None:
        """Send the gradients of a message to where it came from.

        Those that nobody waits for stay here.
        """
        places = self._walk.receipts[received]
        wanted = [
            each if place in places else None
            for place, each in zip(received.tensors, gradients, strict=True)
        ]
        with self._changed:
            self._check()
            self._sent.add(received.message)
            self._own.update(
                _address(part) for each in wanted if each is not None for part in _parts(each)
            )
        self._post(self, received, wanted)

    def _let_newer_ones_finish(self, sent: Sent) -> None:
        """A turn comes when the CPU has nothing else to do.

        Other devices may still be at work on what comes before it.
        """
        while self._has_newer(sent):
            device = (
                torch.accelerator.current_accelerator()
                if torch.accelerator.is_available()
                else None
            )
            assert device is not None, "the engine took a turn before what comes first"
            # the engine runs what is ready on the CPU while it waits for this, which has to go
            # through the device
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


def _copied(gradient: Tensor) -> Tensor:
    if gradient.layout != torch.sparse_coo:
        return gradient.clone(memory_format=torch.contiguous_format)
    indices, values = (
        part.clone(memory_format=torch.contiguous_format) for part in _parts(gradient)
    )
    return torch.sparse_coo_tensor(
        indices,
        values,
        gradient.shape,
        check_invariants=False,
        is_coalesced=gradient.is_coalesced(),
    )
