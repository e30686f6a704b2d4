"""Loss scaling: inside backward, where rows are updated, gradients are multiplied by the scale.

``torch.amp.GradScaler.scale`` is wrapped once in a process: a hook then notes at the start of a
backward pass which scaler scaled its loss. So a program that follows torch's documentation trains
rows right and calls nothing of ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Variable

from pibroch.exchange.finite import are_finite
from pibroch.exchange.fused_optimizer import FusedOptimizer
from pibroch.exchange.recomputation import backward_pass


class Scaler(Protocol):
    """The methods of a scaler that are used here.

    ``unscale_`` is shown gradients that are not finite, so that the scale gets smaller.
    """

    def get_scale(self) -> float:
        """The factor by which losses are multiplied now."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at an optimizer's gradients and remember whether some are not finite."""


_OF_PASS: dict[int, Scaler] = {}
"""The scaler of each backward pass that began at a loss scaled by torch's."""


def scaler_of_pass() -> Scaler | None:
    """The scaler of this thread's backward pass, if one of torch's scaled its loss."""
    number = backward_pass()
    return None if number is None else _OF_PASS.get(number)


def unscaled(gradients: Sequence[Tensor], scaler: Scaler) -> tuple[list[Tensor], bool]:
    """Gradients of the loss itself, float32, and whether all are finite."""
    inverse = 1.0 / scaler.get_scale()
    of_loss = [gradient.float() * inverse for gradient in gradients]
    return of_loss, are_finite(of_loss)


def report_finite(
    scaler: Scaler, is_finite: bool, rows: FusedOptimizer, overflow: FusedOptimizer
) -> None:
    """Show a scaler whether the rows' gradients were finite.

    ``scaler.step(rows)`` and ``scaler.update()`` act on it.

    Args:
        scaler: of the pass.
        is_finite: on all ranks.
        rows: which users may pass to the scaler.
        overflow: another one, hidden from users: a scaler looks at each optimizer once between its
            updates, and it may have looked at ``rows``.
    """
    rows.set_gradients(0.0 if is_finite else torch.inf)
    if not is_finite:
        overflow.set_gradients(torch.inf)
        with suppress(RuntimeError):  # it has been shown already
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
