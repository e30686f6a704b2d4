"""The dot interaction of DLRM as a differentiable function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pibroch.kernels import interaction as kernels


def dot_interaction(bottom: Tensor, embedded: Tensor) -> Tensor:
    """The bottom vector followed by the dot products of all pairs of the F + 1 vectors of a sample.

    The pairs come in the order of ``torch.tril_indices(F + 1, F + 1, -1)``. Float32 and lower
    precision on CPU run in our kernel, in float32; anything else (other devices, float64, what is
    exported) in torch's operations.

    Args:
        bottom: ``[B, D]``.
        embedded: ``[B, F, D]``.

    Returns:
        ``[B, D + (F + 1) F / 2]``.
    """
    floats = {torch.float32, torch.bfloat16, torch.float16}
    is_ours = bottom.device.type == "cpu" and bottom.dtype in floats and embedded.dtype in floats
    if is_ours and not torch.compiler.is_compiling():
        out: Tensor = _DotInteraction.apply(bottom.float(), embedded.float())
        return out
    return torch_interaction(bottom, embedded)


def torch_interaction(bottom: Tensor, embedded: Tensor) -> Tensor:
    """`dot_interaction` in torch's own operations, for any device and dtype."""
    vectors = torch.cat([bottom[:, None].to(embedded.dtype), embedded], 1)
    dots = vectors @ vectors.transpose(1, 2)
    rows, columns = torch.tril_indices(vectors.shape[1], vectors.shape[1], -1, device=dots.device)
    return torch.cat([bottom.to(dots.dtype), dots[:, rows, columns]], 1)


class _DotInteraction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bottom: Tensor, embedded: Tensor) -> Tensor:
        bottom = bottom.contiguous()
        embedded = embedded.contiguous()
        ctx.save_for_backward(bottom, embedded)
        batch, num_features, dim = embedded.shape
        out = torch.empty(batch, dim + num_features * (num_features + 1) // 2)
        _run(kernels.forward, bottom, embedded, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor]:
        bottom, embedded = ctx.saved_tensors
        grad_bottom = torch.empty_like(bottom)
        grad_embedded = torch.empty_like(embedded)
        _run(kernels.backward, bottom, embedded, grad_out.contiguous(), grad_bottom, grad_embedded)
        return grad_bottom, grad_embedded


def _run(operation: Callable[..., None], *tensors: Tensor) -> None:
    operation(*(tensor.detach().numpy() for tensor in tensors))
