"""Distributed autograd with the names of ``torch.distributed.autograd``; README.md explains it."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from torch import Tensor

from pibroch.rpc.autograd.engine import Autograd
from pibroch.rpc.calls.agent import current_agent
from pibroch.rpc.options import UNSET_RPC_TIMEOUT

__all__ = ["backward", "context", "current_context", "get_gradients", "live_counts"]


def current_autograd() -> Autograd:
    """That of this process's agent."""
    autograd = current_agent().packer.recorder
    assert isinstance(autograd, Autograd)
    return autograd


@contextmanager
def context() -> Iterator[int]:
    """Open a context: all calls of this thread inside the ``with`` block belong to one graph.

    The graph spans all workers that the calls reach. Yields the id of the context. When the block
    ends, the context and its gradients are dropped on all workers.

    Raises:
        RuntimeError: when this thread is in a context already.
    """
    autograd = current_autograd()
    if (outer := autograd.current_context()) is not None:
        raise RuntimeError(
            f"got a context inside of context {outer} (Already have an autograd context id for this"
            " thread); need one at a time in a thread; do: use that one"
        )
    context_id = autograd.open()
    try:
        with autograd.entered(context_id):
            yield context_id
    finally:
        autograd.release(context_id)


def backward(
    context_id: int,
    roots: Sequence[Tensor],
    retain_graph: bool = False,
    *,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> None:
    """Accumulate the gradients of the sum of ``roots`` in the context, on all workers of the graph.

    Blocks until all of them are done. ``.grad`` of the leaves does not change: ``get_gradients``
    returns the sums. When this fails, part of the gradients may have been added already.

    Args:
        context_id: from ``context()``.
        roots: scalars that require gradients.
        retain_graph: keep what is needed to call it again on (parts of) this graph.
        timeout: of the whole pass, in seconds, 0 for none; by default that of calls.

    Raises:
        RuntimeError: for a context that is not open or roots that cannot be differentiated.
        RpcTimeoutError: not done in time; all workers have stopped waiting.
        WorkerLostError: a worker of the graph was lost; likewise.
        Exception: what an autograd function or hook raised on any worker; likewise.
    """
    with suppress(TypeError):  # ``backward`` below raises the right error
        context_id = operator.index(context_id)
    current_autograd().coordinator.run(context_id, roots, retain_graph, timeout)


def get_gradients(context_id: int) -> dict[Tensor, Tensor]:
    """The sum of the gradients in the context so far, by leaf of this worker.

    Leaves without a gradient are absent.

    Raises:
        RuntimeError: for a context that is not open on this worker.
    """
    return current_autograd().contexts.get(context_id).gradients()


def current_context() -> int | None:
    """The context that the calling thread is in: its own, or that of the call that it works on."""
    return current_autograd().current_context()


def live_counts() -> dict[str, int]:
    """The number of objects that this worker keeps for all contexts; all 0 at rest.

    By ``contexts``, ``gates`` (send functions), ``passes`` and ``buffers`` (gradients).
    """
    return current_autograd().live_counts()
