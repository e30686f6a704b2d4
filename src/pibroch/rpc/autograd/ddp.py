"""Gradients of leaves, taken where the engine would accumulate them into ``.grad``.

Shown there where DDP watches.

A pass runs the functions that accumulate into leaves, so that users' hooks on them are called, but
takes the gradient before they see it: gradients of a context do not go through ``.grad``, which
several passes may have to do with at once.

``DistributedDataParallel`` hangs hooks behind those functions, reads the gradient in ``.grad``, and
writes the average there when the engine's pass ends. So where there may be DDP, each leaf's
gradient is shown there for the time of a pass, and what DDP made of it is taken from it. What was
in ``.grad`` before comes back in the end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from pibroch.rpc.autograd.gates import BackwardGate, is_running

_lock = threading.Lock()
_before: dict[
    Tensor, tuple[Tensor | None, int]
] = {}  # .grad as it was, and how many passes show theirs at the moment
_shown: dict[int, Tensor] = {}  # by id


def is_needed() -> bool:
    """Whether there may be DDP in this process."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


class LeafGradients:
    """Inside the ``with`` block the gradients that the pass ``backward`` has for ``leaves`` (nodes that accumulate) come here.

    Hooks before those nodes see and may change the gradient; hooks behind them are called without
    one, as nothing is accumulated. ``shows``: whether ``.grad`` shows the gradients until the end
    of the block.
    """

    def __init__(self, backward: BackwardGate, leaves: Iterable[Node], shows: bool) -> None:
        self._backward = backward
        self._shows = shows
        self._leaves: list[Any] = list(leaves)
        self._handles: list[Any] = []
        self._gradients: dict[Tensor, Tensor] = {}

    def __enter__(self) -> LeafGradients:
        self._handles = [
            leaf.register_prehook(self._shower(leaf.variable)) for leaf in self._leaves
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
                    leaf.grad = (
                        None  # else a pass that goes on would take it for what DDP made of its own
                    )
                else:
                    leaf.grad = _before.pop(leaf)[0]

    def gradients(self) -> list[Tensor | None]:
        """After the block: one for each leaf."""
        return [self._gradients.get(leaf.variable) for leaf in self._leaves]

    def _shower(self, leaf: Tensor) -> object:
        def show(gradients: tuple[Tensor | None, ...]) -> tuple[None] | None:
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

        return show


def _result(leaf: Tensor, gradient: Tensor) -> Tensor:
    """What became of a gradient.

    It may have been written into, or a part of DDP's memory put in its place.
    """
    present = leaf.grad
    if present is None or present is gradient or id(present) in _shown:
        return gradient
    return present.clone()
