"""DCNv2: explicit crosses of growing order, and a deep network after or beside them.

Wang et al. 2021.

Shape legend: B samples, K = F D + n inputs, R rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from pibroch.config.model import CrossConfig, DCNv2Config
from pibroch.models.base import Model
from pibroch.models.linear import Linear
from pibroch.models.mlp import MLP, HiddenOptions


class CrossNet(nn.Module):
    """``x_{l+1} = x_0 * (W_l x_l + b_l) + x_l``, with ``W_l = U_l V_l`` of rank R when given.

    Args:
        width: K.
        num_layers: crosses; the result holds products of up to ``num_layers + 1`` inputs.
        rank: R, or ``None`` for full matrices.
    """

    def __init__(self, width: int, num_layers: int, rank: int | None = None) -> None:
        super().__init__()
        self.reduce = nn.ModuleList()
        if rank is not None:
            self.reduce.extend(Linear(width, rank, bias=False) for _ in range(num_layers))
        self.cross = nn.ModuleList(Linear(rank or width, width) for _ in range(num_layers))

    def forward(self, x0: Tensor) -> Tensor:
        """``[B, K]`` to ``[B, K]``."""
        x = x0
        for i in range(len(self.cross)):
            x = torch.addcmul(x, x0, self.factor(i, x).to(x0.dtype))
        return x

    def factor(self, i: int, x: Tensor) -> Tensor:
        """By what cross ``i`` multiplies ``x_0``, ``[B, K]``."""
        out: Tensor = self.cross[i](self.reduce[i](x) if self.reduce else x)
        return out


class DCNv2(Model):
    """Crosses and a deep network.

    ``stacked`` is the deep network on the crosses; ``parallel`` is one linear layer on both.
    """

    section: ClassVar[type[CrossConfig]] = DCNv2Config
    crosses: ClassVar[type[CrossNet]] = CrossNet

    def __init__(self, num_dense: int, num_features: int, config: CrossConfig) -> None:
        super().__init__(num_dense, num_features, config)
        width = num_features * config.dim + num_dense
        self.cross = self.crosses(width, config.cross_layers, config.cross_rank)
        self.parallel = config.structure == "parallel"
        self.deep = MLP((width, *config.top), HiddenOptions.of(config), last_is_hidden=True)
        deep_width = config.top[-1] if config.top else width
        self.head = Linear(deep_width + (width if self.parallel else 0), 1)

    def logits(self, dense: Tensor, embeddings: Callable[[], Tensor]) -> Tensor:  # noqa: D102
        x0 = torch.cat([embeddings().flatten(1), dense], 1)
        crossed = self.cross(x0)
        features = torch.cat([crossed, self.deep(x0)], 1) if self.parallel else self.deep(crossed)
        out: Tensor = self.head(features)
        return out.squeeze(1)
