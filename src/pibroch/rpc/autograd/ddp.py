"""Gradients of leaves, taken before the engine accumulates them into ``.grad``.

A pass runs the functions that accumulate into leaves, so that users' hooks on them are called, but
takes the gradient before they get it: gradients of a context do not go through ``.grad``, which
several passes may use at once.

``DistributedDataParallel`` (DDP) registers hooks behind those functions, reads the gradient in
``.grad``, and writes the average there when the engine's pass ends. So where DDP may be in use,
``.grad`` shows each leaf's gradient for the time of a pass, and the result is read from it. In the
end ``.grad`` gets its former value.

Threads: passes of several threads may share leaves; the lock guards ``.grad`` and the tables here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from pibroch.rpc.autograd.send_receive import RunningPass, is_running

_lock = threading.Lock()
# by leaf: ``.grad`` as it was, and how many passes show gradients there now
_before: dict[Tensor, tuple[Tensor | None, int]] = {}
_shown: dict[int, Tensor] = {}  # gradients in ``.grad`` now, by ``id``


def is_needed() -> bool:
    """Whether DDP may be in use in this process."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@contextmanager
def leaf_gradients(
    backward: RunningPass, leaves: Iterable[Node], shows: bool
) -> Iterator[dict[Tensor, Tensor]]:
    """Collect the gradients of leaves in a pass, inside the ``with`` block; they hold after it.

    Hooks before the nodes get and may change the gradient; hooks behind them are called without
    one, as nothing is accumulated.

    Args:
        backward: the pass.
        leaves: nodes that accumulate into leaves.
        shows: whether ``.grad`` shows the gradients until the end of the block.
    """
    gradients: dict[Tensor, Tensor] = {}

    def take(leaf: Tensor, arrived: tuple[Tensor | None, ...]) -> tuple[None] | None:
        gradient = arrived[0]
        if gradient is None or not is_running(backward):
            return None
        gradients[leaf] = _show(leaf, gradient) if shows else gradient
        return (None,)  # nothing to accumulate

    nodes: Iterable[Any] = leaves
    handles = [node.register_prehook(partial(take, node.variable)) for node in nodes]
    try:
        yield gradients
    finally:
        for handle in handles:
            handle.remove()
        if shows:
            _hide(gradients)


def _show(leaf: Tensor, gradient: Tensor) -> Tensor:
    """Let ``.grad`` show a copy of the gradient, as DDP writes into it; returns the copy."""
    gradient = gradient.clone()
    with _lock:
        before, num_passes = _before.get(leaf, (leaf.grad, 0))
        _before[leaf] = (before, num_passes + 1)
        _shown[id(gradient)] = leaf.grad = gradient
    return gradient


def _hide(gradients: dict[Tensor, Tensor]) -> None:
    """Replace gradients that are shown by the results, and show what was there before."""
    with _lock:
        for leaf, gradient in gradients.items():
            gradients[leaf] = _result(leaf, gradient)
            _shown.pop(id(gradient))
            before, num_passes = _before[leaf]
            if num_passes > 1:
                _before[leaf] = (before, num_passes - 1)
                # else a pass that goes on would take this gradient for the result of its own
                leaf.grad = None
            else:
                leaf.grad = _before.pop(leaf)[0]


def _result(leaf: Tensor, gradient: Tensor) -> Tensor:
    """The gradient after DDP may have written into it, or put one of its own in its place."""
    present = leaf.grad
    if present is None or present is gradient or id(present) in _shown:
        return gradient
    return present.clone()
