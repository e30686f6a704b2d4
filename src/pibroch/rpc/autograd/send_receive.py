"""Send and receive functions, where a graph crosses workers, and the walk between them.

Section 3.4 of the paper. A *send function* is one more consumer of a tensor that was sent, made
when it is sent. A *receive function* is the producer of a message's tensors at its receiver. Both
work only inside a backward pass (``passes.py``), which they look up by the number that torch's
engine has for the pass under way.

In a pass, *turns* decide when a worker waits. There is one for each message sent that takes part; a
turn waits for the message's gradients and then lets its send functions run. Turns come newest
message first. They have the lowest priority that there is, so the engine takes one only when
nothing else is left to do. That is why waiting inside the engine is safe: what could still be done
on this worker then depends on messages no newer than this one, and the gradients waited for do not,
since whatever they depend on was made later than the message that they belong to.

Threads: torch's engine runs these functions in the thread that called ``run_engine`` (for the CPU)
and in its own threads (one for each device).
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
        message: its number.
        to: the receiver.
        order: counts the messages of a context on each worker, sent and received.
        outputs: by the tensor's place in the message, the output of its send function.
    """

    message: int
    to: WorkerInfo
    order: int
    outputs: dict[int, Tensor]


@dataclass(frozen=True, slots=True)
class Received:
    """A message with tensors that require gradients, at its receiver.

    Attributes:
        message: its number.
        origin: the sender.
        order: as of ``Sent``.
        tensors: places in the message of the tensors that require gradients.
    """

    message: int
    origin: WorkerInfo
    order: int
    tensors: tuple[int, ...]


class RunningPass(Protocol):
    """The part of a backward pass that the functions here use."""

    def await_turn(self, sent: Sent) -> None:
        """Wait until the gradients of a message have arrived."""

    def gradient(self, message: int, tensor: int) -> Tensor | None:
        """The gradient of one tensor of a message."""

    def send(self, received: Received, gradients: Sequence[Tensor | None]) -> None:
        """Send the gradients of a message to the worker that sent the message."""


_running: dict[int, RunningPass] = {}  # by the engine's number for the pass


def is_running(backward: RunningPass) -> bool:
    """Whether the engine works for ``backward`` in this thread."""
    return _running.get(torch._C._current_graph_task_id()) is backward


def _current_pass() -> RunningPass:
    backward = _running.get(torch._C._current_graph_task_id())
    if backward is None:
        raise RuntimeError(
            "got a local backward pass that reached a tensor of another worker; need one over all"
            " workers; do: call pibroch.rpc.autograd.backward(context_id, [loss])"
        )
    return backward


class _Send(Function):
    @staticmethod
    def forward(ctx: Any, message: int, place: int, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.message = message
        ctx.place = place
        ctx.device = tensor.device
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        gradient = _current_pass().gradient(ctx.message, ctx.place)
        if gradient is not None and gradient.device != ctx.device:
            gradient = gradient.to(ctx.device)
        return None, None, gradient


class _Receive(Function):
    @staticmethod
    def forward(
        ctx: Any, received: Received, anchor: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        # the tensors themselves become outputs: views of them would forbid work in place
        ctx.mark_dirty(*tensors)
        ctx.received = received
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        _current_pass().send(ctx.received, gradients)
        return (None,) * (2 + len(gradients))


class _Turn(Function):
    @staticmethod
    def forward(ctx: Any, backward: RunningPass, sent: Sent, *next_ones: Tensor) -> Tensor:
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
        backward: RunningPass,
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


_RECEIVE = _Receive._backward_cls
_LEAF = type(torch.empty((), requires_grad=True).expand(1).grad_fn.next_functions[0][0])  # type: ignore[union-attr]


def make_send_function(message: int, place: int, tensor: Tensor) -> Tensor:
    """Make a send function of ``tensor`` [any shape]; returns its output, which keeps it alive."""
    return cast(Tensor, _Send.apply(message, place, tensor))


def make_receive_function(
    received: Received, anchor: Tensor, tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The tensors of a message as outputs of its receive function.

    Args:
        received: the message.
        anchor: a leaf that requires a gradient; there is one for a context, and it never gets one.
        tensors: those that require gradients.
    """
    with torch.enable_grad():
        # not views: several views from one function cannot be worked on in place
        fresh = [tensor.data for tensor in tensors]
        return cast(tuple[Tensor, ...], _Receive.apply(received, anchor, *fresh))


@dataclass(slots=True)
class Walk:
    """A walk through a local graph from several starts, one after another.

    No node is visited twice.

    Attributes:
        visited: the nodes.
        received: places of the received tensors that were reached, by message.
        leaves: nodes that accumulate into leaves.
    """

    visited: set[Any] = field(default_factory=set)
    received: dict[Received, set[int]] = field(default_factory=dict)
    leaves: list[Node] = field(default_factory=list)

    def go(self, starts: Iterable[tuple[Node | None, int]]) -> list[tuple[Received, int]]:
        """Walk on from ``starts``: pairs of a node and the number of its output.

        A node with the priority of turns (the first that a thread makes has it) gets a higher one.

        Returns:
            The received tensors that this call reached first.
        """
        reached = []
        stack = [*starts]
        while stack:
            node, output = stack.pop()
            if node is None:
                continue
            if type(node) is _RECEIVE:
                received = cast(Any, node).received
                places = self.received.setdefault(received, set())
                if (place := received.tensors[output]) not in places:
                    places.add(place)
                    reached.append((received, place))
            if node in self.visited:
                continue
            self.visited.add(node)
            if type(node) is _LEAF:
                self.leaves.append(node)
                continue
            if node._sequence_nr() == _LOWEST_PRIORITY:
                cast(Any, node)._set_sequence_nr(_LOWEST_PRIORITY + 1)
            if type(node) is not _RECEIVE:
                stack += node.next_functions
        return reached


def start_of(tensor: Tensor) -> tuple[Node, int]:
    """Where a walk from ``tensor`` starts."""
    return torch.autograd.graph.get_gradient_edge(tensor)[:2]


def behind(output: Tensor) -> tuple[tuple[Node | None, int], ...]:
    """Where a walk from a send function starts, of which ``output`` is the output."""
    assert output.grad_fn is not None
    return output.grad_fn.next_functions


def run_engine(
    backward: RunningPass,
    roots: Sequence[Tensor],
    sends: Iterable[tuple[Sent, Sequence[Tensor]]],
    inputs: Sequence[Any],
    retain_graph: bool,
) -> None:
    """Run one pass of torch's engine in this thread; the engine may wait for other workers in it.

    The functions that accumulate into leaves run, with their hooks; ``ddp.py`` takes the gradients
    from them.

    Args:
        backward: the pass.
        roots: scalars to start from.
        sends: messages whose gradients will arrive, the oldest first, with the outputs of their
            send functions that take part.
        inputs: gradient edges.
        retain_graph: keep what the graph saved.
    """
    started: list[int] = []
    with torch.enable_grad():
        last: list[Tensor] = []
        for sent, tokens in sends:
            for token in tokens:
                _raise_priority(token)
            turn = cast(Tensor, _Turn.apply(backward, sent, *tokens, *last))
            cast(Any, turn.grad_fn)._set_sequence_nr(_LOWEST_PRIORITY)
            last = [turn]
        start = cast(Tensor, _Launch.apply(backward, started, len(roots), *roots, *last))
    try:
        torch.autograd.backward(start, torch.ones(()), retain_graph=retain_graph, inputs=inputs)
    finally:
        for number in started:
            _running.pop(number, None)


def _raise_priority(output: Tensor) -> None:
    node = cast(Any, output.grad_fn)
    if node._sequence_nr() == _LOWEST_PRIORITY:
        node._set_sequence_nr(_LOWEST_PRIORITY + 1)
