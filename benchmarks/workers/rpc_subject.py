"""The caller's measurements of topic ``rpc``.

The same code for every contender, and one more part for those with references.

A phase is named ``KIND:NUMBER``: a function and the bytes of its argument, or ``in_flight`` and how
many calls.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import cache, cached_property, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.workers import rpc_functions
from benchmarks.workers.rpc_functions import LAYER_WIDTH, Layer

CALLEE = "callee"
CALLER = "caller"
FUNCTIONS = ("identity", "plus_one", "ops", "send")
"""Of :mod:`rpc_functions`, that take a tensor and return one."""
SIZES = (1000, 4_000_000, 40_000_000, 400_000_000)
IN_FLIGHT = (1, 16, 256)
CALLS_PER_STEP = 500
BATCH_SIZE = 128


@cache
def argument(nbytes: int) -> Tensor:
    """The argument of that many bytes, float32."""
    return torch.rand(nbytes // 4, generator=torch.Generator().manual_seed(nbytes))


class CallSubject(ABC):
    """A contender that can call ``FUNCTIONS`` at the callee.

    Its callee's side only has to be built.
    """

    @abstractmethod
    def start(self, function: str, tensor: Tensor) -> Any:
        """Begin a call; what ``finish`` needs."""

    @abstractmethod
    def finish(self, started: Any) -> Tensor:
        """Wait for its result."""

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """See :class:`benchmarks.workers.serving.Subject`."""

    def call(self, function: str, tensor: Tensor) -> Tensor:
        """Call and wait."""
        return self.finish(self.start(function, tensor))

    def phases(self) -> dict[str, Callable[[int], object]]:
        """See :class:`benchmarks.workers.serving.Subject`; the batch's number plays no part."""
        results: dict[str, Callable[[int], object]] = {}
        for function in FUNCTIONS:
            results |= {f"{function}:{size}": partial(self._call, function, size) for size in SIZES}
        return results | {f"in_flight:{count}": partial(self._many, count) for count in IN_FLIGHT}

    def check(self, steps: int) -> dict[str, list[float]]:
        """Compare results of the ``steps`` smallest sizes with those computed here.

        An error if one differs.

        With no steps: how long the parts of the steps took that were timed since.
        """
        for nbytes in SIZES[:steps]:
            self._check(nbytes)
        return {}

    def _call(self, function: str, nbytes: int, _: int) -> None:
        self.call(function, argument(nbytes))

    def _many(self, count: int, _: int) -> None:
        tensor = argument(SIZES[0])
        under_way = deque[Any]()
        for _call in range(CALLS_PER_STEP):
            if len(under_way) == count:
                self.finish(under_way.popleft())
            under_way.append(self.start("identity", tensor))
        while under_way:
            self.finish(under_way.popleft())

    def _check(self, nbytes: int) -> None:
        for name in FUNCTIONS:
            tensor = argument(nbytes)
            if not torch.equal(self.call(name, tensor), getattr(rpc_functions, name)(tensor)):
                raise AssertionError(
                    f"got another result of {name} for {nbytes} bytes than locally"
                )


class RpcSubject(CallSubject):
    """A contender with the interface of ``torch.distributed.rpc``.

    Pibroch and torch run the same lines.

    Args:
        rpc, autograd: the modules.
        versions: packages that matter.
    """

    def __init__(self, rpc: ModuleType, autograd: ModuleType, versions: dict[str, str]) -> None:
        self._rpc = rpc
        self._autograd = autograd
        self._versions = versions
        self._parts: dict[str, list[float]] = {}

    def start(self, function: str, tensor: Tensor) -> Any:
        """See :class:`CallSubject`."""
        return self._rpc.rpc_async(CALLEE, getattr(rpc_functions, function), args=(tensor,))

    def finish(self, started: Any) -> Tensor:
        """See :class:`CallSubject`."""
        result: Tensor = started.wait()
        return result

    def call(self, function: str, tensor: Tensor) -> Tensor:
        """See :class:`CallSubject`."""
        result: Tensor = self._rpc.rpc_sync(
            CALLEE, getattr(rpc_functions, function), args=(tensor,)
        )
        return result

    def versions(self) -> dict[str, str]:
        """See :class:`CallSubject`."""
        return self._versions

    def phases(self) -> dict[str, Callable[[int], object]]:
        """With references (paper's Table 1) and the two layers (Table 2)."""
        references = {f"rref:{size}": partial(self._reference, size) for size in SIZES}
        layers = {
            "norpc": self._without_rpc,
            "nograd": self._without_gradients,
            "grad": self._with_gradients,
        }
        return super().phases() | references | layers

    def check(self, steps: int) -> dict[str, list[float]]:
        """See :class:`CallSubject`; also references and gradients."""
        if not steps:
            parts = self._parts
            self._parts = {}
            return parts
        self._check_references()
        return super().check(steps)

    def _reference(self, nbytes: int, _: int) -> Tensor:
        rref = self._rpc.RRef(argument(nbytes))
        result: Tensor = self._rpc.rpc_sync(CALLEE, rpc_functions.fetch, args=(rref,))
        return result

    def _check_references(self) -> None:
        if not torch.equal(self._reference(SIZES[1], 0), argument(SIZES[1])):
            raise AssertionError("got another tensor through a remote reference")
        (local_near, local_far) = self._without_rpc(0)
        (near, far) = self._with_gradients(0)
        for ours, other in zip(local_far + local_near, far + near, strict=True):
            torch.testing.assert_close(other, ours)

    @cached_property
    def _layers(self) -> tuple[Any, Layer, Layer]:
        """The first layer at the callee; the second here.

        And the first one here as well, for the times without RPC.
        """
        return self._rpc.remote(CALLEE, Layer), Layer(), Layer()

    def _forward(self) -> Tensor:
        first, second, _ = self._layers
        hidden = first.remote().forward(self._rpc.RRef(_input()))
        return second.local(hidden.to_here()).square().mean()

    def _without_rpc(self, _: int) -> tuple[list[Tensor], list[Tensor]]:
        _, second, first = self._layers
        for layer in (first, second):
            layer.zero_grad()
        start = time.perf_counter()
        loss = second.local(first.local(_input())).square().mean()
        middle = time.perf_counter()
        loss.backward()
        self._note("norpc", start, middle)
        return _gradients(second), _gradients(first)

    def _without_gradients(self, _: int) -> None:
        start = time.perf_counter()
        with torch.no_grad():
            self._forward()
        self._note("nograd", start, time.perf_counter())

    def _with_gradients(self, batch: int) -> tuple[list[Tensor], list[Tensor]]:
        first, second, _ = self._layers
        with self._autograd.context() as context_id:
            start = time.perf_counter()
            loss = self._forward()
            middle = time.perf_counter()
            self._autograd.backward(context_id, [loss])
            self._note("grad", start, middle)
            if batch:
                return [], []
            near = self._autograd.get_gradients(context_id)
            far = self._rpc.rpc_sync(
                first.owner(),
                rpc_functions.gradients_of,
                args=(first, self._autograd.__name__, context_id),
            )
            return [near[parameter] for parameter in second.parameters()], far

    def _note(self, name: str, start: float, middle: float) -> None:
        """A step's forward part until ``middle``, and its backward part until now."""
        self._parts.setdefault(f"{name}-fwd", []).append((middle - start) * 1e3)
        self._parts.setdefault(f"{name}-bwd", []).append((time.perf_counter() - middle) * 1e3)


@cache
def _input() -> Tensor:
    return torch.randn(BATCH_SIZE, LAYER_WIDTH, generator=torch.Generator().manual_seed(5))


def _gradients(layer: nn.Module) -> list[Tensor]:
    return [
        parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None
    ]
