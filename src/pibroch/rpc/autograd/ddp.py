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
from collections.abc import Iterable
from types import TracebackType
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


class LeafGradients:
    """Collects the gradients of leaves in a pass, inside the ``with`` block.

    Hooks before the nodes get and may change the gradient; hooks behind them are called without
    one, as nothing is accumulated.

    Args:
        backward: the pass.
        leaves: nodes that accumulate into leaves.
        shows: whether ``.grad`` shows the gradients until the end of the block.
    """

    def __init__(self, backward: RunningPass, leaves: Iterable[Node], shows: bool) -> None:
        self._backward = backward
        self._shows = shows
        self._leaves: list[Any] = list(leaves)
        self._handles: list[Any] = []
        self._gradients: dict[Tensor, Tensor] = {}

    def __enter__(self) -> LeafGradients:
        self._handles = [
            leaf.register_prehook(self._hook_of(leaf.variable)) for leaf in self._leaves
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        if not self._shows:
            return
        with _lock:
            for leaf, gradient in self._gradients.items():
                self._gradients[leaf] = _result(leaf, gradient)
                _shown.pop(id(gradient))
                before, num_passes = _before[leaf]
                if num_passes > 1:
                    _before[leaf] = (before, num_passes - 1)
                    # else a pass that goes on would take this gradient for the result of its own
                    leaf.grad = None
                else:
                    leaf.grad = _before.pop(leaf)[0]

    def gradients(self) -> list[Tensor | None]:
        """One gradient or ``None`` for each leaf, after the block."""
        return [self._gradients.get(leaf.variable) for leaf in self._leaves]

    def _hook_of(self, leaf: Tensor) -> object:
        def take(gradients: tuple[Tensor | None, ...]) -> tuple[None] | None:
            gradient = gradients[0]
            if gradient is None or not is_running(self._backward):
                return None
            if not self._shows:
                self._gradients[leaf] = gradient
                return (None,)
            gradient = gradient.clone()  # DDP writes into it
            with _lock:
                before, num_passes = _before.get(leaf, (leaf.grad, 0))
                _before[leaf] = (before, num_passes + 1)
                _shown[id(gradient)] = self._gradients[leaf] = leaf.grad = gradient
            return (None,)  # nothing to accumulate

        return take


def _result(leaf: Tensor, gradient: Tensor) -> Tensor:
    """The gradient after DDP may have written into it, or put one of its own in its place."""
    present = leaf.grad
    if present is None or present is gradient or id(present) in _shown:
        return gradient
    return present.clone()
