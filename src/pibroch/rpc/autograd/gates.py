"""The autograd functions at the boundaries between workers, and the walk between them (paper, section 3.4).

A *gate* is one more consumer of a tensor that was sent, made when it is sent. A *receipt* is what
produced the tensors of a message at the receiver. Both only mean something inside a backward pass
(``passes.py``), which they find by the number that torch's engine has for the pass under way.

In a pass, *turns* decide when a worker waits. There is one for each message sent that takes part; a
turn waits for the message's gradients and then lets the gates run. Turns come newest message first.
They have the lowest priority that there is, so the engine takes one only when nothing else is left
to do. That is why waiting inside the engine is safe: what could still be done on this worker then
depends on messages no newer than this one, and the gradients waited for do not, since whatever they
depend on was made later than the message that they belong to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import Node

from pibroch.rpc.info import WorkerInfo

_LOWEST_PRIORITY = 0


@dataclass(frozen=True, slots=True)
class Sent:
    """A message with tensors that require gradients, at its sender.

    Attributes:
        to: the receiver.
        order: gates and receipts of a context are counted on each worker, as they are made.
        gates: by the tensor's place in the message, an output of its gate.
    """

    message: int
    to: WorkerInfo
    order: int
    gates: dict[int, Tensor]


@dataclass(frozen=True, slots=True)
class Received:
    """The same at its receiver.

    Attributes:
        tensors: places in the message of the tensors that require gradients.
    """

    message: int
    origin: WorkerInfo
    order: int
    tensors: tuple[int, ...]


class BackwardGate(Protocol):
    """What gates, receipts and turns need of a backward pass."""

    def await_turn(self, sent: Sent) -> None:
        """Wait until the gradients of a message are there."""

    def gradient(self, message: int, tensor: int) -> Tensor | None:
        """One of them."""

    def send(self, received: Received, gradients: Sequence[Tensor | None]) -> None:
        """Send the gradients of a message to where it came from."""


_running: dict[int, BackwardGate] = {}  # by the engine's number for the pass


def is_running(backward: BackwardGate) -> bool:
    """Whether the engine works for ``backward`` in this thread."""
    return _running.get(torch._C._current_graph_task_id()) is backward


def _here() -> BackwardGate:
    backward = _running.get(torch._C._current_graph_task_id())
    if backward is None:
        raise RuntimeError(
            "got a local backward pass that reached a tensor of another worker; need one over all"
            " workers; do: call pibroch.rpc.autograd.backward(context_id, [loss])"
        )
    return backward


class _Gate(Function):
    @staticmethod
    def forward(ctx: Any, message: int, place: int, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.message = message
        ctx.place = place
        ctx.device = tensor.device
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        gradient = _here().gradient(ctx.message, ctx.place)
        if gradient is not None and gradient.device != ctx.device:
            gradient = gradient.to(ctx.device)
        return None, None, gradient


class _Receipt(Function):
    @staticmethod
    def forward(
        ctx: Any, received: Received, anchor: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        # they become outputs themselves, and not views, which forbid work in place
        ctx.mark_dirty(*tensors)
        ctx.received = received
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        _here().send(ctx.received, gradients)
        return (None,) * (2 + len(gradients))


class _Turn(Function):
    @staticmethod
    def forward(ctx: Any, backward: BackwardGate, sent: Sent, *next_ones: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.pass_ = backward
        ctx.sent = sent
        ctx.num_next = len(next_ones)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[None, ...]:
        ctx.pass_.await_turn(ctx.sent)
        return (None,) * cast(int, 2 + ctx.num_next)


class _Launch(Function):
    @staticmethod
    def forward(
        ctx: Any,
        backward: BackwardGate,
        started: list[int],
        num_roots: int,
        *roots_and_turn: Tensor,
    ) -> Tensor:
        ctx.pass_ = backward
        ctx.started = started
        ctx.num_turns = len(roots_and_turn) - num_roots
        ctx.save_for_backward(*roots_and_turn[:num_roots])
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        number = torch._C._current_graph_task_id()
        _running[number] = ctx.pass_
        ctx.started.append(number)
        return None, None, None, *map(torch.ones_like, ctx.saved_tensors), *[None] * ctx.num_turns


_RECEIPT = _Receipt._backward_cls
_LEAF = type(torch.empty((), requires_grad=True).expand(1).grad_fn.next_functions[0][0])  # type: ignore[union-attr]


def make_gate(message: int, place: int, tensor: Tensor) -> Tensor:
    """A gate behind ``tensor``, [any shape]; returns its output, which keeps it."""
    return cast(Tensor, _Gate.apply(message, place, tensor))


def make_receipt(
    received: Received, anchor: Tensor, tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The tensors of a message as results of its receipt.

    Args:
        received: the message.
        anchor: a leaf that requires a gradient; there is one for a context, and it never gets one.
        tensors: those that require gradients.
    """
    with torch.enable_grad():
        # no views: several views in one function cannot be worked on in place
        fresh = [tensor.data for tensor in tensors]
        return cast(tuple[Tensor, ...], _Receipt.apply(received, anchor, *fresh))


@dataclass(slots=True)
class Walk:
    """A walk through a local graph from several starts, one after another.

    No node is visited twice.

    Attributes:
        visited: the nodes seen.
        receipts: places of the tensors reached, by message that they came in.
        leaves: nodes that accumulate into leaves.
    """

    visited: set[Any] = field(default_factory=set)
    receipts: dict[Received, set[int]] = field(default_factory=dict)
    leaves: list[Node] = field(default_factory=list)

    def go(self, starts: Iterable[tuple[Node | None, int]]) -> list[tuple[Received, int]]:
        """Walk on from ``starts``, (node, which of its outputs).

        Returns the received tensors that were reached first now.

        Nodes get a priority above that of turns, if they should have theirs (the first node that a
        thread makes).
        """
        found = []
        stack = [*starts]
        while stack:
            node, output = stack.pop()
            if node is None:
                continue
            if type(node) is _RECEIPT:
                received = cast(Any, node).received
                places = self.receipts.setdefault(received, set())
                if (place := received.tensors[output]) not in places:
                    places.add(place)
                    found.append((received, place))
            if node in self.visited:
                continue
            self.visited.add(node)
            if type(node) is _LEAF:
                self.leaves.append(node)
                continue
            if node._sequence_nr() == _LOWEST_PRIORITY:
                cast(Any, node)._set_sequence_nr(_LOWEST_PRIORITY + 1)
            if type(node) is not _RECEIPT:
                stack += node.next_functions
        return found


def start_of(tensor: Tensor) -> tuple[Node, int]:
    """Where a walk from ``tensor`` starts."""
    return torch.autograd.graph.get_gradient_edge(tensor)[:2]


def behind(gate: Tensor) -> tuple[tuple[Node | None, int], ...]:
    """Where a walk from a gate starts."""
    assert gate.grad_fn is not None
    return gate.grad_fn.next_functions


def run_engine(
    backward: BackwardGate,
    roots: Sequence[Tensor],
    gates: Iterable[tuple[Sent, Sequence[Tensor]]],
    inputs: Sequence[Any],
    retain_graph: bool,
) -> None:
    """One pass of torch's engine in this thread, which may wait in it for other workers.

    The functions that accumulate into leaves run, with their hooks; what they get is for ``ddp.py``
    to take.

    Args:
        backward: the pass.
        roots: scalars to start from.
        gates: messages whose gradients will come, and the gates that take part; the oldest message
            first.
        inputs: gradient edges.
        retain_graph: keep what the graph saved.
    """
    started: list[int] = []
    with torch.enable_grad():
        last: list[Tensor] = []
        for sent, tokens in gates:
            for token in tokens:
                _prefer(token)
            turn = cast(Tensor, _Turn.apply(backward, sent, *tokens, *last))
            cast(Any, turn.grad_fn)._set_sequence_nr(_LOWEST_PRIORITY)
            last = [turn]
        start = cast(Tensor, _Launch.apply(backward, started, len(roots), *roots, *last))
    try:
        torch.autograd.backward(start, torch.ones(()), retain_graph=retain_graph, inputs=inputs)
    finally:
        for number in started:
            _running.pop(number, None)


def _prefer(gate: Tensor) -> None:
    node = cast(Any, gate.grad_fn)
    if node._sequence_nr() == _LOWEST_PRIORITY:
        node._set_sequence_nr(_LOWEST_PRIORITY + 1)
