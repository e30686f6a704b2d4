"""A linear layer that takes the faster of torch's two matrix libraries, and rectifies in place.

`torch.nn.Linear` multiplies with MKL; oneDNN, in the same wheel, is not reached by it in float32.
On an AMD EPYC, DLRM's forward products and input gradients took 6 to 20 % less time in oneDNN. The
numbers agree within rounding.

Shape legend: B samples, I inputs, O outputs.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

FEW_SAMPLES = 16
"""So many go the short way through MKL in models that serve.

oneDNN takes some 12 us to be called, as long as a layer.
"""


class Linear(nn.Linear):
    """`torch.nn.Linear` with the same parameters and names.

    Call with ``relu=True`` for the rectified output.

    Attributes:
        few_samples: up to so many go through MKL where no gradients are computed; 0 while a model
            trains, so that its evaluation does not depend on how samples are divided among ranks.
    """

    few_samples = 0

    def forward(self, x: Tensor, relu: bool = False) -> Tensor:
        """Map ``[B, I]`` to ``[B, O]``.

        It runs in oneDNN: float32 on CPU outside autocast, but for :attr:`few_samples`.
        """
        out: Tensor
        computes_gradients = torch.is_grad_enabled()
        if (
            not computes_gradients
            and not torch.compiler.is_compiling()
            and len(x) <= self.few_samples
        ):
            out = functional.linear(x, self.weight, self.bias)
            return out.relu_() if relu else out
        if _runs_in_onednn(x, self.weight):
            if not computes_gradients:
                out = _multiply(x, self.weight, self.bias)
                return out.relu_() if relu else out
            out = _Linear.apply(x, self.weight, self.bias, relu)
            return out
        out = functional.linear(x, self.weight, self.bias)
        return out.relu() if relu else out


def _runs_in_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        x.device.type == weight.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.ndim == 2
        and x.numel() > 0
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()  # nor exported: others do not know oneDNN's operator
        and _has_onednn()
    )


@lru_cache(maxsize=1)
def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _multiply(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """``left @ right.T + bias``.

    Not with oneDNN's own ReLU, which would turn NaN into zero and hide a diverged run.
    """
    out: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
        out = _multiply(x, weight, bias)
        if relu:
            out.relu_()
        ctx.save_for_backward(x, weight, out if relu else None)
        return out

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight, rectified = ctx.saved_tensors
        grad = (
            grad.contiguous()
            if rectified is None
            else torch.ops.aten.threshold_backward(grad, rectified, 0)
        )
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_x = _multiply(grad, weight.t()) if needs_x else None
        grad_weight = _grad_weight(grad, x) if needs_weight else None
        return grad_x, grad_weight, grad.sum(0) if needs_bias else None, None


def _grad_weight(grad: Tensor, x: Tensor) -> Tensor:
    """``grad.T @ x``, ``[O, I]``, in MKL.

    It reads a transposed operand in place, where oneDNN would have it copied.
    """
    if x.shape[1] < grad.shape[1]:
        return torch.mm(x.t(), grad).t()
    return torch.mm(grad.t(), x)
