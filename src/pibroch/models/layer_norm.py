"""Layer norm with a weight for each place."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class LayerNorm(nn.Module):
    """Normalises a sample's numbers along the last dim, then scales and shifts them.

    Unlike `torch.nn.LayerNorm` it may have a weight of its own for each vector of a sample, and no
    gradient of it depends on the number of threads.

    Args:
        *shape: of weight and bias: ``(C,)``, or ``(F, D)`` for F vectors of width D.
    """

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))
        self.bias = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        """``[B, *shape]`` to the same."""
        normalised = functional.layer_norm(x, x.shape[-1:])
        return torch.addcmul(self.bias, normalised.to(self.bias.dtype), self.weight)
