"""DCNv2, DeepFM and Wide&Deep as pibroch builds them by default, in plain torch.

For TorchRec, which has no such models.

Layers are made in pibroch's order, so that one seed gives both the same starting weights.

Shape legend: B samples, F features, D dim, n dense features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.cases import TOP_SIZES, Case
from benchmarks.workers.dlrm import perceptron

CROSS_LAYERS = 3


class PlainDCNv2(nn.Module):
    """Crosses beside a deep network: ``dense [B, n], embedded [B, F, D]`` to logits ``[B]``."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        width = case.num_tables * case.dim + case.num_dense
        self.cross = nn.ModuleList(nn.Linear(width, width) for _ in range(CROSS_LAYERS))
        self.deep = perceptron((width, *TOP_SIZES[:-1]), last_relu=True)
        self.head = nn.Linear(TOP_SIZES[-2] + width, 1)

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """Logits ``[B]``."""
        x = x0 = torch.cat([embedded.flatten(1), dense], 1)
        for cross in self.cross:
            x = torch.addcmul(x, x0, cross(x))
        logits: Tensor = self.head(torch.cat([x, self.deep(x0)], 1))
        return logits.squeeze(1)


class PlainWideAndDeep(nn.Module):
    """First-order weights, a linear function of the dense features, a deep network.

    The first are the last column of the rows.
    """

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.dim = case.dim - 1
        self.linear = nn.Linear(case.num_dense, 1)
        self.deep = perceptron(
            (case.num_tables * self.dim + case.num_dense, *TOP_SIZES), last_relu=False
        )

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """Logits ``[B]`` from ``embedded [B, F, D + 1]``."""
        vectors, first_order = embedded.split([self.dim, 1], dim=2)
        deep = self.deep(torch.cat([vectors.flatten(1), dense], 1)).squeeze(1)
        logits: Tensor = deep + first_order.sum((1, 2)) + self.linear(dense).squeeze(1)
        return logits


class PlainDeepFM(PlainWideAndDeep):
    """Wide&Deep and the dot products of all pairs of embeddings."""

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """Logits ``[B]``."""
        vectors = embedded[:, :, : self.dim]
        pairs = (vectors.sum(1).square().sum(1) - vectors.square().sum((1, 2))) / 2
        return super().forward(dense, embedded) + pairs


PLAIN_MODELS: dict[str, type[nn.Module]] = {
    "dcnv2": PlainDCNv2,
    "deepfm": PlainDeepFM,
    "wide_deep": PlainWideAndDeep,
}


def plain_model(case: Case) -> nn.Module:
    """The case's model with its starting weights."""
    torch.manual_seed(case.seed)
    return PLAIN_MODELS[case.model](case)
