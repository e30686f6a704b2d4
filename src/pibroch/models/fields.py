"""Vectors of all fields, for models that treat a dense feature as they treat an embedding.

Shape legend: B samples, n dense features, F categorical ones, D embedding width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Fields(nn.Module):
    """Embeddings, followed by ``x_i v_i`` for each dense feature (AutoInt, Song et al. 2019).

    Args:
        num_dense: n, may be 0.
        num_features: F.
        dim: D.

    Attributes:
        count: ``F + n``.
    """

    def __init__(self, num_dense: int, num_features: int, dim: int) -> None:
        super().__init__()
        self.count = num_features + num_dense
        self.of_dense = nn.Parameter(torch.randn(num_dense, dim) / dim**0.5) if num_dense else None

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """``[B, n]`` and ``[B, F, D]`` to ``[B, F + n, D]``."""
        if self.of_dense is None:
            return embedded
        return torch.cat([embedded, dense[:, :, None] * self.of_dense], 1)
