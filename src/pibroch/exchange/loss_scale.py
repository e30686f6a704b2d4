"""Loss scaling: rows are updated inside backward, where gradients are still multiplied by the scale.

``torch.amp.GradScaler.scale`` is wrapped once in a process: autograd then says at the begin of a
backward pass which scaler scaled its loss. So a program that only does what torch's documentation
tells it to trains rows right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Variable

from pibroch.exchange.fused_optimizer import FusedOptimizer
from pibroch.exchange.recomputation import backward_pass


class Scaler(Protocol):
    """What of a scaler is needed.

    ``unscale_`` hears of gradients that are not finite, so that the scale gets smaller.
    """

    def get_scale(self) -> float:
        """By what losses are multiplied now."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at an optimizer's gradients and remember whether some are not finite."""


_OF_PASS: dict[int, Scaler] = {}
"""The scaler of each backward pass that began at a loss scaled by torch's."""


def scaler_of_pass() -> Scaler | None:
    """Of the backward pass that this thread is in, as far as torch's own scaled its loss."""
    number = backward_pass()
    return None if number is None else _OF_PASS.get(number)


def unscaled(gradients: Sequence[Tensor], scaler: Scaler) -> tuple[list[Tensor], bool]:
    """Gradients of the loss itself, float32, and whether all are finite."""
    inverse = 1.0 / scaler.get_scale()
    found = [gradient.float() * inverse for gradient in gradients]
    return found, all(bool(torch.isfinite(gradient).all()) for gradient in found)


def tell(scaler: Scaler, is_finite: bool, rows: FusedOptimizer, overflow: FusedOptimizer) -> None:
    """Let ``scaler.step(rows)`` know whether the rows' gradients were finite, and ``scaler.update()`` if they were not.

    Args:
        scaler: of the pass.
        is_finite: on all ranks.
        rows: which users may pass to the scaler.
        overflow: another one, which they know nothing of: a scaler looks at each optimizer once
            between its updates.
    """
    rows.set_gradients(0.0 if is_finite else torch.inf)
    if not is_finite:
        overflow.set_gradients(torch.inf)
        with suppress(RuntimeError):  # it knows already
            scaler.unscale_(overflow)


def _notice_scalers() -> None:
    scale = torch.amp.GradScaler.scale

    @wraps(scale)
    def scale_and_note(self: torch.amp.GradScaler, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        if self.is_enabled():
            for tensor in _tensors(scaled):
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(lambda _: _note(self))
        return scaled

    setattr(torch.amp.GradScaler, scale.__name__, scale_and_note)


def _tensors(scaled: Any) -> Iterator[Tensor]:
    if isinstance(scaled, Tensor):
        yield scaled
    elif isinstance(scaled, list | tuple):
        for each in scaled:
            yield from _tensors(each)


def _note(scaler: Scaler) -> None:
    number = backward_pass()
    assert number is not None, "a hook of a node runs inside a pass"
    _OF_PASS[number] = scaler

    def forget() -> None:
        _OF_PASS.pop(number, None)

    Variable._execution_engine.queue_callback(forget)


_notice_scalers()
