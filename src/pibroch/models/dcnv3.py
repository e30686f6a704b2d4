"""DCNv3: crosses whose order grows linearly beside crosses whose order grows exponentially.

Li et al., "DCNv3: Towards Next Generation Deep Cross Network for Click-Through Rate Prediction",
arXiv 2407.13349, 2024 (later "FCN"), and the authors' code in the collection FuxiCTR. With
``c_l = W_l x_l`` of half the width and the self-mask ``s_l = c_l * relu(LN(c_l))``, the exponential
network is ``x_{l+1} = x_l * ([c_l, s_l] + b_l) + x_l``, the linear one has ``x_1`` for the first
``x_l``. The halves of ``x_1`` are the first and the second halves of all fields' vectors. The logit
is the mean of both networks'.

Differs from the paper: the loss is that of the mean alone, not Tri-BCE, whose weights depend on
means over a batch; one head; the biases start as those of torch's layers.

Shape legend: B samples, F fields, D embedding width, K = F D.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pibroch.config.model_zoo import DCNv3Config
from pibroch.models.base import Model
from pibroch.models.dropout import Dropout
from pibroch.models.fields import Fields
from pibroch.models.layer_norm import LayerNorm
from pibroch.models.linear import Linear


class MaskedCross(nn.Module):
    """``a * ([c, s] + b) + x`` with ``c = W x`` and ``s = c * relu(LN(c))``, then dropout.

    Args:
        halves: widths of c and s; where the fields' vectors have an odd width, s is the shorter.
        dropout: probability of zero.
    """

    def __init__(self, halves: tuple[int, int], dropout: float) -> None:
        super().__init__()
        width = sum(halves)
        self.reduce = Linear(width, halves[0], bias=False)
        self.norm = LayerNorm(halves[0])
        self.bias = nn.Parameter(torch.empty(width).uniform_(-1, 1) / width**0.5)
        self.num_masked = halves[1]
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, anchor: Tensor) -> Tensor:
        """``[B, K]`` and ``a`` ``[B, K]`` to ``[B, K]``."""
        half = self.reduce(x)
        masked = (half * self.norm(half).relu())[:, : self.num_masked]
        factor = torch.cat([half.to(x.dtype), masked.to(x.dtype)], 1) + self.bias
        out: Tensor = self.dropout(torch.addcmul(x, anchor, factor))
        return out


class MaskedCrossNet(nn.Module):
    """Crosses of one kind, and a linear layer on them.

    Args:
        halves: as for :class:`MaskedCross`.
        config: number of crosses, dropout.
        is_exponential: multiply with what enters a cross, not with what enters the first one.
    """

    def __init__(self, halves: tuple[int, int], config: DCNv3Config, is_exponential: bool) -> None:
        super().__init__()
        self.is_exponential = is_exponential
        self.cross = nn.ModuleList(
            MaskedCross(halves, config.dropout) for _ in range(config.cross_layers)
        )
        self.head = Linear(sum(halves), 1)

    def forward(self, first: Tensor) -> Tensor:
        """``[B, K]`` to logits ``[B, 1]``."""
        x = first
        for cross in self.cross:
            x = cross(x, x if self.is_exponential else first)
        out: Tensor = self.head(x)
        return out


class DCNv3(Model):
    """An exponential and a linear cross network."""

    section = DCNv3Config

    def __init__(self, num_dense: int, num_features: int, config: DCNv3Config) -> None:
        super().__init__(num_dense, num_features, config)
        self.fields = Fields(num_dense, num_features, config.dim)
        second = config.dim // 2 * self.fields.count
        width = config.dim * self.fields.count
        halves = (width - second, second)
        self.exponential = MaskedCrossNet(halves, config, is_exponential=True)
        self.linear = MaskedCrossNet(halves, config, is_exponential=False)

    def logits(self, dense: Tensor, embeddings: Callable[[], Tensor]) -> Tensor:  # noqa: D102
        vectors = self.fields(dense, embeddings())
        halves = vectors.tensor_split(2, dim=2)
        first = torch.cat([half.flatten(1) for half in halves], 1)
        out: Tensor = (self.exponential(first) + self.linear(first)) / 2
        return out.squeeze(1)
