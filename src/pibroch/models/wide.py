"""Wide&Deep and DeepFM: a linear model, a deep network, and for DeepFM pairs.

Cheng et al. 2016; Guo et al. 2017.

The first-order weight of an id is the last column of its row, so that it is fetched and updated
with the embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from pibroch.config.model import DeepConfig, DeepFMConfig, WideAndDeepConfig
from pibroch.models.base import Model
from pibroch.models.linear import Linear
from pibroch.models.mlp import MLP, HiddenOptions


class WideAndDeep(Model):
    """A linear model and a deep network on all features.

    The logit is the sum of first-order weights of the ids, a linear function of the dense features
    and the deep network.
    """

    section: ClassVar[type[DeepConfig]] = WideAndDeepConfig

    def __init__(self, num_dense: int, num_features: int, config: DeepConfig) -> None:
        super().__init__(num_dense, num_features, config)
        self.linear = Linear(num_dense, 1) if num_dense else None
        self.deep = MLP(
            (num_features * config.dim + num_dense, *config.top, 1), HiddenOptions.of(config)
        )

    @classmethod
    def table_dim(cls, dim: int) -> int:
        """``dim + 1``: the embedding and the first-order weight."""
        return dim + 1

    def logits(self, dense: Tensor, embeddings: Callable[[], Tensor]) -> Tensor:  # noqa: D102
        linear = 0.0 if self.linear is None else self.linear(dense).squeeze(1)
        vectors, first_order = embeddings().split([self.config.dim, 1], dim=2)
        deep: Tensor = self.deep(torch.cat([vectors.flatten(1), dense], 1))
        logits: Tensor = deep.squeeze(1) + first_order.sum((1, 2)) + self.pairs(vectors) + linear
        return logits

    def pairs(self, vectors: Tensor) -> Tensor | float:
        """What the model adds for pairs of ids: nothing here."""
        return 0.0


class DeepFM(WideAndDeep):
    """Wide&Deep with a factorisation machine.

    The sum of the dot products of all pairs of embeddings is added.
    """

    section = DeepFMConfig

    def pairs(self, vectors: Tensor) -> Tensor:
        """``sum_{i<j} <v_i, v_j> = (|sum v|^2 - sum |v|^2) / 2``, ``[B]`` from ``[B, F, D]``."""
        return (vectors.sum(1).square().sum(1) - vectors.square().sum((1, 2))) / 2
