"""Distributed autograd at one worker: its part in messages, contexts, and backward passes.

Threads: ``outgoing`` runs in the thread that calls another worker; ``incoming`` where messages are
handled, on the loop or in a caller that reads its own answer; ``_on_lost`` on the loop.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from pibroch.errors import ProtocolError, RpcError, WorkerLostError
from pibroch.rpc.autograd.contexts import MAX_SENT, Context, Contexts
from pibroch.rpc.autograd.coordinator import Coordinator
from pibroch.rpc.autograd.messages import Graph, Release
from pibroch.rpc.autograd.send_receive import (
    Received,
    Sent,
    make_receive_function,
    make_send_function,
)
from pibroch.rpc.calls.agent import Agent
from pibroch.rpc.info import WorkerInfo


class Autograd:
    """Contexts (``contexts``) and backward passes (``coordinator``) of one agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.contexts = Contexts()
        self.coordinator = Coordinator(agent, self.contexts)
        self.entered = self.contexts.entered
        self.current_context = self.contexts.current
        agent.serve(Release, self._on_release)
        agent.when_lost(self._on_lost)
        agent.when_closed(self.close)

    # messages

    def outgoing(
        self, context: int, to: WorkerInfo, tensors: list[Tensor]
    ) -> tuple[Graph | None, list[Tensor]]:
        """Record a message that leaves: send functions of its tensors that require gradients.

        Returns:
            The graph's part of the message, ``None`` when ``to`` needs none; the tensors, detached.
        """
        own = self.contexts.find(context)
        detached = [tensor.detach() for tensor in tensors]
        if own is None:
            return None, detached
        needed = torch.is_grad_enabled()
        places = [place for place, tensor in enumerate(tensors) if needed and tensor.requires_grad]
        if not places and to in own.reached:
            return None, detached
        own.reached.add(to)
        message = next(self._agent.ids)
        if places:
            if len(own.sent) >= MAX_SENT:
                raise RpcError(
                    f"{len(own.sent):,} messages in one autograd context",
                    f"at most {MAX_SENT:,}",
                    "use several",
                )
            outputs = {
                place: make_send_function(message, place, tensors[place]) for place in places
            }
            own.sent[message] = Sent(message, to, next(own.orders), outputs)
        return Graph(context, own.creator, message, tuple(places)), detached

    def incoming(self, origin: WorkerInfo, graph: object, tensors: list[Tensor]) -> list[Tensor]:
        """Record a message that arrived: its tensors that require gradients at the sender do here.

        Raises:
            ProtocolError: for a graph that does not fit the tensors.
        """
        try:
            part = msgspec.convert(graph, Graph)
        except msgspec.ValidationError as error:
            raise ProtocolError(
                f"a part of a graph that cannot be read ({error})", "one as in the wire format"
            ) from error
        own = self._agent.info.id
        is_stale = (
            origin.id != own and part.creator[0] == own and self.contexts.find(part.context) is None
        )
        context = None if is_stale else self.contexts.open(part.context, part.creator, origin.id)
        if context is None:
            return tensors
        context.reached.add(origin)
        places = part.tensors
        if not places:
            return tensors
        if not _fits(places, tensors):
            raise ProtocolError(
                f"gradients for tensors {places}",
                f"different ones of {len(tensors)}, of floating type",
            )
        received = Received(part.message, origin, next(context.orders), places)
        chosen = [tensors[place] for place in places]
        # a message to itself: the tensors share memory with the sender's, which its graph may need
        if origin.id == self._agent.info.id:
            chosen = [tensor.clone() for tensor in chosen]
        outputs = make_receive_function(received, context.anchor, chosen)
        arrived = list(tensors)
        for place, tensor in zip(places, outputs, strict=True):
            arrived[place] = tensor
        return arrived

    # contexts

    def open(self) -> int:
        """Open a new context, whose creator is this worker; returns its id."""
        context_id = next(self._agent.ids)
        self.contexts.open(context_id, (self._agent.info.id, self._agent.incarnation))
        return context_id

    def release(self, context: int) -> None:
        """Close a context here and, by messages, on all workers that it reached."""
        self._drop(
            context,
            RpcError(
                "a backward pass in a closed context",
                "an open one",
                "leave the with block after it",
            ),
        )

    def live_counts(self) -> dict[str, int]:
        """How many ``contexts``, ``gates``, ``passes`` and ``buffers`` (gradients) are kept."""
        contexts = self.contexts.all()
        passes = [each for context in contexts for each in tuple(context.passes.values())]
        return {
            "contexts": len(contexts),
            "gates": sum(
                len(sent.outputs) for context in contexts for sent in tuple(context.sent.values())
            ),
            "passes": len(passes),
            "buffers": sum(len(context.gradients()) for context in contexts)
            + sum(each.num_waiting for each in passes),
        }

    def close(self) -> None:
        """Drop all contexts; passes under way fail."""
        for context in self.contexts.all():
            self.contexts.close(context.id)
            _clear(context, RpcError("a backward pass on a worker that was shut down"))

    def _drop(self, context_id: int, error: Exception, for_good: bool = True) -> None:
        context = self.contexts.close(context_id, for_good)
        if context is None:
            return
        _clear(context, error)
        for worker in tuple(context.reached):
            if worker.id != self._agent.info.id:
                self._agent.notify(worker, Release(context_id))

    def _on_release(self, origin: WorkerInfo, release: Release, value: object) -> None:
        self.release(release.context)

    def _on_lost(self, worker: WorkerInfo, incarnation: int) -> None:
        error = WorkerLostError(worker.name, "it was lost in the middle of distributed autograd")
        for context in self.contexts.all():
            if incarnation:  # else it could not be dialled, but may still have dialled this worker
                context.reached.discard(worker)
            is_own = context.creator[0] == self._agent.info.id
            is_over = context.creator == (worker.id, incarnation)
            # no worker is left that would release it
            if is_over or (not is_own and not context.reached):
                self._drop(context.id, error, for_good=is_over)
        self.coordinator.lost(worker, error)


def _clear(context: Context, error: Exception) -> None:
    for part in tuple(context.passes.values()):
        part.abort(error)
    context.passes.clear()
    context.clear()


def _fits(places: tuple[int, ...], tensors: list[Tensor]) -> bool:
    return len(set(places)) == len(places) and all(
        0 <= place < len(tensors)
        and (tensors[place].is_floating_point() or tensors[place].is_complex())
        for place in places
    )
