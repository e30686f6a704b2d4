"""QNN-alpha: layers that are quadratic in what enters them.

Li et al., "Revisiting Feature Interactions from the Perspective of Quadratic Neural Networks for
Click-through Rate Prediction", KDD 2025, and the authors' code (salmon1802/QNN, ``QNN_T26``):
``x_{l+1} = P x_l * sum_m act(norm(W_{l,m} x_l + b_{l,m})) + x_l``, a Khatri-Rao product with M rows
whose activation is in the middle. P puts the parts that H heads have of each field's vector head by
head; with one head it changes nothing.

Differs from the paper: a sample passes once, without the self-ensemble loss of two passes with
other dropout, for a loss sees one logit.

Shape legend: B samples, F fields, D embedding width, K = F D, M rows, H heads.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from pibroch.config.model_zoo import QNNConfig
from pibroch.errors import ConfigError
from pibroch.models.base import Model
from pibroch.models.dropout import Dropout
from pibroch.models.fields import Fields
from pibroch.models.linear import Linear
from pibroch.models.mlp import MLP, HiddenOptions


class QuadraticLayer(nn.Module):
    """``P x * sum_m hidden_m(x) + x``, then dropout.

    Args:
        num_fields: F.
        config: D, M, H and what is in the middle.
    """

    def __init__(self, num_fields: int, config: QNNConfig) -> None:
        super().__init__()
        width = num_fields * config.dim
        self.heads = config.heads
        self.num_rows = config.cross_rows
        self.rows = MLP((width, width * config.cross_rows), HiddenOptions.of(config), True)
        self.dropout = Dropout(config.dropout)

    def forward(self, vectors: Tensor) -> Tensor:
        """``[B, F, D]`` to the same."""
        batch, fields, dim = vectors.shape
        x = vectors.flatten(1)
        by_head = vectors.unflatten(2, (self.heads, dim // self.heads)).transpose(1, 2).flatten(2)
        rows = self.rows(x).view(batch, self.heads, self.num_rows, by_head.shape[2])
        products = by_head * rows.sum(2)
        out: Tensor = self.dropout(products.flatten(1) + x)
        return out.view(batch, fields, dim)


class QNN(Model):
    """Quadratic layers and a linear one."""

    section = QNNConfig

    def __init__(self, num_dense: int, num_features: int, config: QNNConfig) -> None:
        super().__init__(num_dense, num_features, config)
        if config.dim % config.heads:
            raise ConfigError(
                f"{config.heads} heads for embeddings of width {config.dim}",
                "heads that divide it",
                "change model.heads or model.dim",
            )
        self.fields = Fields(num_dense, num_features, config.dim)
        self.layers = nn.Sequential(
            *(QuadraticLayer(self.fields.count, config) for _ in range(config.cross_layers))
        )
        self.head = Linear(self.fields.count * config.dim, 1)

    def logits(self, dense: Tensor, embeddings: Callable[[], Tensor]) -> Tensor:  # noqa: D102
        vectors: Tensor = self.fields(dense, embeddings())
        out: Tensor = self.head(self.layers(vectors).flatten(1))
        return out.squeeze(1)
