"""Memory that a model's tensors take in a step, found by running one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pibroch.models.base import Model

FEW = 1024
MORE = 2048
"""Samples of two steps, so many that parameters and their gradients are little beside them."""


def activation_bytes(model: Model) -> float:
    """Bytes a sample of all tensors of a step at their most, its forward and backward pass.

    Embeddings count; parameters and their gradients do not.
    """
    few, more = (_most(model, num_samples) for num_samples in (FEW, MORE))
    return (more - few) / (MORE - FEW)


class _Memory(TorchDispatchMode):
    """Follows the memory of tensors that operations give.

    Attributes:
        most: bytes at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._now = 0
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        self._now += storage.nbytes()
        self.most = max(self.most, self._now)
        weakref.finalize(storage, self._remove, storage.nbytes())

    def _remove(self, num_bytes: int) -> None:
        self._now -= num_bytes


def _most(model: Model, num_samples: int) -> int:
    shape = num_samples, model.num_features, model.table_dim(model.config.dim)
    memory = _Memory()
    with torch.enable_grad(), memory:
        embedded = torch.zeros(shape).requires_grad_()
        model(torch.zeros(num_samples, model.num_dense), embedded).sum().backward()
    return memory.most
