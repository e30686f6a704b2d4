"""``DistributedOptimizer``: one local optimizer with its state at each owner of parameters."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pibroch.rpc import autograd
from pibroch.rpc.api import rpc_async
from pibroch.rpc.info import WorkerInfo
from pibroch.rpc.rref import RRef

__all__ = ["DistributedOptimizer"]

_step_lock = threading.Lock()  # several optimizers of a worker may have the same parameters


class LocalOptimizer:
    """An optimizer of this worker's parameters that takes their gradients from a context.

    Args:
        optimizer_class: a ``torch.optim.Optimizer``.
        parameters: references to values of this worker.
        args: positional arguments of the optimizer.
        kwargs: its keyword arguments.
    """

    def __init__(
        self, optimizer_class: type, parameters: Sequence[RRef[Tensor]], args: Any, kwargs: Any
    ) -> None:
        self._parameters = [reference.local_value() for reference in parameters]
        self._optimizer: torch.optim.Optimizer = optimizer_class(self._parameters, *args, **kwargs)

    def step(self, context_id: int) -> None:
        """Make one step with the gradients of a context; a parameter without one does not change.

        Afterwards ``.grad`` is as before.
        """
        gradients = autograd.get_gradients(context_id)
        with _step_lock:
            before = [parameter.grad for parameter in self._parameters]
            try:
                for parameter in self._parameters:
                    parameter.grad = gradients.get(parameter)
                self._optimizer.step()
            finally:
                for parameter, gradient in zip(self._parameters, before, strict=True):
                    parameter.grad = gradient


def new_local_optimizer(
    optimizer_class: type, parameters: Sequence[RRef[Tensor]], args: object, kwargs: object
) -> RRef[LocalOptimizer]:
    """Make the optimizer of parameters, at their owner."""
    return RRef(LocalOptimizer(optimizer_class, parameters, args, kwargs))


class DistributedOptimizer:
    """Optimizes parameters of several workers; each keeps the optimizer's state of its parameters.

    Steps of several callers run one after another on each worker. The gradients are those of the
    context: nothing is read from ``.grad`` or left in it.

    Args:
        optimizer_class: a ``torch.optim.Optimizer`` whose step needs no closure; each owner makes
            one of its parameters.
        params_rref: references to the parameters.
        args: positional arguments of the optimizer.
        kwargs: its keyword arguments.

    Raises:
        Exception: what making the optimizer raised at an owner, with notes of other owners' errors.
    """

    def __init__(
        self,
        optimizer_class: type,
        params_rref: Sequence[RRef[Tensor]],
        *args: object,
        **kwargs: object,
    ) -> None:
        by_owner: dict[WorkerInfo, list[RRef[Tensor]]] = defaultdict(list)
        for reference in params_rref:
            by_owner[reference.owner()].append(reference)
        if not by_owner:
            raise ValueError("got no parameters; need references to at least one")
        self.remote_optimizers: list[RRef[LocalOptimizer]] = _results(
            {
                owner: rpc_async(
                    owner, new_local_optimizer, (optimizer_class, references, args, kwargs)
                )
                for owner, references in by_owner.items()
            }
        )

    def step(self, context_id: int) -> None:
        """Make one step at every owner with the gradients of the context; blocks until it is done.

        Raises:
            RuntimeError: for a context that is not open.
            WorkerLostError: an owner was lost.
            Exception: what the optimizer raised at an owner, with notes of other owners' errors.
        """
        own = autograd.current_autograd()
        own.contexts.get(context_id)  # raises for one that is not open
        with own.entered(context_id):  # so that owners without a call in the context open it
            futures = {
                each.owner(): each.rpc_async().step(context_id) for each in self.remote_optimizers
            }
        _results(futures)


def _results(futures: Mapping[WorkerInfo, torch.futures.Future[Any]]) -> list[Any]:
    """All results; when there are errors, the first with notes of the others."""
    results = []
    errors = []
    for owner, future in futures.items():
        try:
            results.append(future.wait())
        except Exception as error:
            errors.append((owner, error))
    if not errors:
        return results
    first = errors[0][1]
    for owner, other in errors[1:]:
        first.add_note(f"and on worker {owner.name!r}: {type(other).__name__}: {other}")
    raise first
