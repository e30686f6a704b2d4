"""Dropout whose mask depends on seed, step, layer and a sample's number in the global batch alone.

So a sample meets the same mask on whichever rank it lies, and after whichever interruption. What
several samples have in common, as an item, may have a number of its own in their place.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pibroch.errors import ConfigError
from pibroch.kernels.arrays import Ints
from pibroch.kernels.dropout import dropout


class Dropout(nn.Module):
    """`torch.nn.Dropout` by counter.

    One mask a module and step, for whoever calls :func:`set_place` before each step.

    Until then each call draws a fresh mask from torch's random numbers, as `torch.nn.Dropout` does.
    Two places in a network need two modules: within a step a module's mask stays the same.

    Args:
        p: probability of zero, in ``[0, 1)``.

    Raises:
        ConfigError: for ``p`` out of range.
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ConfigError(f"dropout of {p}", "a probability of at least 0 and below 1")
        self.p = p
        self._key: int | None = None
        self._first_sample = 0
        self._places: Ints | None = None

    def forward(self, x: Tensor, numbers: Tensor | None = None) -> Tensor:
        """``[B, ...]`` to the same shape and dtype.

        Args:
            x: of samples.
            numbers: int64 ``[B]``, in place of the samples' own; equal ones share a mask.
        """
        if not self.training or not self.p:
            return x
        key = int(torch.randint(2**63 - 1, ())) if self._key is None else self._key
        rows = self._numbers(len(x)) if numbers is None else numbers.cpu().numpy()
        out: Tensor = _Dropout.apply(x, _Mask(key, self.p, rows))
        return out

    def _numbers(self, count: int) -> Ints:
        """The numbers of ``count`` rows of an input: its samples, or as many of each sample."""
        places = self._places
        if places is None or not len(places) or count % len(places):
            return np.arange(self._first_sample, self._first_sample + count)
        each = count // len(places)
        return (places[:, None] * each + np.arange(each)).ravel()

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return f"p={self.p}"


def set_place(
    model: nn.Module, seed: int, step: int, first_sample: int = 0, places: Ints | None = None
) -> None:
    """Fix the masks of all :class:`Dropout` modules of a model for its next step.

    Args:
        model: numbered are its modules in the order of ``modules()``.
        seed: of the run.
        step: any number that differs from step to step.
        first_sample: place of this rank's first sample in the global batch.
        places: of all its samples, int64 ``[B]``, where they are not side by side there.
    """
    for layer, module in enumerate(
        module for module in model.modules() if isinstance(module, Dropout)
    ):
        digest = hashlib.blake2b(f"dropout {seed} {step} {layer}".encode(), digest_size=8).digest()
        module._key = int.from_bytes(digest, "little")
        module._first_sample = first_sample
        module._places = places


@dataclass(frozen=True, slots=True, eq=False)
class _Mask:
    key: int
    p: float
    numbers: Ints

    def apply(self, x: Tensor) -> Tensor:
        """``x`` masked and scaled.

        Float32 on CPU takes one pass, the rest a mask in float32 and torch's product.
        """
        if x.device.type != "cpu" or x.dtype != torch.float32:
            return x * self.apply(torch.ones(x.shape)).to(x.device, x.dtype)
        x = x.detach().contiguous()
        out = torch.empty_like(x)
        shape = (len(x), math.prod(x.shape[1:]))
        dropout(x.view(shape).numpy(), out.view(shape).numpy(), self.key, self.p, self.numbers)
        return out


class _Dropout(torch.autograd.Function):
    """Linear and diagonal: the gradient goes through the same mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: _Mask) -> Tensor:
        ctx.mask = mask
        return mask.apply(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Dropout.apply(gradients[0], ctx.mask), None
