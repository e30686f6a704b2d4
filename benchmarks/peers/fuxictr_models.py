"""The models of topic ``models`` on FuxiCTR's layers, from their papers.

Its wheel has such for long sequences alone. Each has the parameters of pibroch's model of that
name, in the same order, so that trained weights go from one to the other. Dense features enter as
they are, behind the embeddings.

Shape legend: B samples, F features that are no sequence, n dense features, D embedding width, K = F
D + n inputs, T positions.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from fuxictr.features import FeatureMap
from fuxictr.pytorch.layers import (
    CrossNetV2,
    DIN_Attention,
    FeatureEmbedding,
    InnerProductInteraction,
    LogisticRegression,
    MLP_Block,
)
from fuxictr.pytorch.models import BaseModel
from torch import Tensor, nn

from benchmarks.model_cases import ATTENTION_HIDDEN, CROSS_LAYERS, GATE_HIDDEN, ModelCase

Inputs = dict[str, Tensor]


class Peer(BaseModel):  # type: ignore[misc]  # FuxiCTR has no types
    """A model of FuxiCTR's that keeps the time of its epochs.

    Attributes:
        epoch_seconds: of each epoch, from asking for its first batch to the end of its last step.
    """

    def __init__(self, feature_map: FeatureMap, case: ModelCase, folder: Path) -> None:
        super().__init__(
            feature_map,
            model_id=case.model,
            early_stop_patience=case.patience,
            verbose=0,
            model_root=str(folder),
            metrics=["AUC", "logloss"],
        )
        specs = feature_map.features
        self.dense = [name for name, spec in specs.items() if spec["type"] == "numeric"]
        self.singles = [name for name, spec in specs.items() if spec["type"] == "categorical"]
        self.width = len(self.singles) * case.dim + len(self.dense)
        self.embedding = FeatureEmbedding(
            feature_map,
            case.dim,
            embedding_initializer=f"partial(nn.init.normal_, std={case.initial_std})",
            not_required_feature_columns=self.dense,
        )
        self.epoch_seconds: list[float] = []
        self._evaluation_seconds = 0.0

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        """What FuxiCTR trains on: probabilities ``[B, 1]``."""
        features = self.get_inputs(inputs)
        return {"y_pred": self.output_activation(self.logits(features))}

    def logits(self, features: Inputs) -> Tensor:
        """Logits ``[B, 1]``."""
        raise NotImplementedError

    def vectors(self, features: Inputs) -> Tensor:
        """Embeddings ``[B, F, D]``."""
        out: Tensor = self.embedding(features, feature_type="categorical")
        return out

    def joined(self, features: Inputs, *parts: Tensor) -> Tensor:
        """Parts ``[B, ...]`` and the dense features, beside each other."""
        dense = [features[name].float().view(-1, 1) for name in self.dense]
        return torch.cat([*(part.flatten(1) for part in parts), *dense], 1)

    def tables(self) -> dict[str, list[nn.Embedding]]:
        """Of each feature that is no sequence the tables that it reads."""
        layers = self.embedding.embedding_layer.embedding_layers
        return {name: [layers[name]] for name in self.singles}

    def dense_parameters(self) -> list[nn.Parameter]:
        """All others, in the order of pibroch's."""
        of_tables = {id(table.weight) for tables in self.tables().values() for table in tables}
        return [each for each in self.parameters() if id(each) not in of_tables]

    def train_epoch(self, data_generator: Iterable[Inputs]) -> None:
        """See there."""
        self._evaluation_seconds = 0.0
        begin = time.perf_counter()
        super().train_epoch(data_generator)
        self.epoch_seconds.append(time.perf_counter() - begin - self._evaluation_seconds)

    def eval_step(self) -> None:
        """See there."""
        begin = time.perf_counter()
        super().eval_step()
        self._evaluation_seconds += time.perf_counter() - begin


class DCNv2(Peer):
    """Crosses and a deep network side by side, under a linear layer (Wang et al. 2021)."""

    def __init__(self, feature_map: FeatureMap, case: ModelCase, folder: Path) -> None:
        super().__init__(feature_map, case, folder)
        self.cross = CrossNetV2(self.width, CROSS_LAYERS)
        self.deep = MLP_Block(self.width, list(case.top))
        self.head = nn.Linear(self.width + case.top[-1], 1)

    def logits(self, features: Inputs) -> Tensor:
        """See :class:`Peer`."""
        x = self.joined(features, self.vectors(features))
        out: Tensor = self.head(torch.cat([self.cross(x), self.deep(x)], 1))
        return out


class DeepFM(Peer):
    """First-order weights, a factorisation machine and a deep network (Guo et al. 2017)."""

    def __init__(self, feature_map: FeatureMap, case: ModelCase, folder: Path) -> None:
        super().__init__(feature_map, case, folder)
        self.linear = LogisticRegression(feature_map, use_bias=False)
        for weight in self.linear.parameters():
            nn.init.zeros_(weight)
        self.pairs = InnerProductInteraction(len(self.singles), output="product_sum")
        self.deep = MLP_Block(self.width, list(case.top), output_dim=1)

    def logits(self, features: Inputs) -> Tensor:
        """See :class:`Peer`."""
        vectors = self.vectors(features)
        deep: Tensor = self.deep(self.joined(features, vectors))
        return deep + self.pairs(vectors) + self.linear(features)

    def tables(self) -> dict[str, list[nn.Embedding]]:
        """See :class:`Peer`; an id has a first-order weight, too."""
        weights = self.linear.embedding_layer.embedding_layer.embedding_layers
        return {name: [*tables, weights[name]] for name, tables in super().tables().items()}


class Gate(nn.Module):
    """``2 sigmoid(MLP(c)) * x`` of a learned vector c."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.constant = nn.Parameter(torch.randn(dim) / dim**0.5)
        self.network = MLP_Block(
            dim, list(GATE_HIDDEN), output_dim=width, output_activation="Sigmoid"
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[B, K]`` to the same."""
        gates: Tensor = self.network(self.constant[None])
        return 2 * gates * x


class Fusion(nn.Module):
    """``b + w_1 x + w_2 y + x^T W y``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.products = nn.Parameter(torch.randn(1, width, width) * 2**0.5 / width)
        self.first = nn.Linear(width, 1)
        self.second = nn.Linear(width, 1, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Twice ``[B, width]`` to ``[B, 1]``."""
        fused = ((x @ self.products[0]) * y).sum(1, keepdim=True)
        out: Tensor = self.first(x) + self.second(y) + fused
        return out


class FinalMLP(Peer):
    """Two gated networks and a bilinear fusion (Mao et al. 2023)."""

    def __init__(self, feature_map: FeatureMap, case: ModelCase, folder: Path) -> None:
        super().__init__(feature_map, case, folder)
        self.gates = nn.ModuleList(Gate(case.dim, self.width) for _ in range(2))
        self.streams = nn.ModuleList(MLP_Block(self.width, list(case.top)) for _ in range(2))
        self.fusion = Fusion(case.top[-1])

    def logits(self, features: Inputs) -> Tensor:
        """See :class:`Peer`."""
        x = self.joined(features, self.vectors(features))
        streams = zip(self.streams, self.gates, strict=True)
        out: Tensor = self.fusion(*(stream(gate(x)) for stream, gate in streams))
        return out


class FactorizedInteraction(nn.Module):
    """``[a, a * b]`` of a linear map's halves a and b."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width_in, width_out)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, width_in]`` to ``[B, width_out]``."""
        first, second = self.linear(x).chunk(2, 1)
        return torch.cat([first, first * second], 1)


class FinalNet(Peer):
    """The mean of two blocks of factorized interactions (Zhu et al. 2023).

    One of them has a gate over fields.
    """

    def __init__(self, feature_map: FeatureMap, case: ModelCase, folder: Path) -> None:
        super().__init__(feature_map, case, folder)
        self.gate = nn.Linear(len(self.singles), len(self.singles))
        nn.init.zeros_(self.gate.weight)
        nn.init.ones_(self.gate.bias)
        widths = (2 * self.width, self.width)
        self.blocks = nn.ModuleList(block((width, *case.top)) for width in widths)

    def logits(self, features: Inputs) -> Tensor:
        """See :class:`Peer`."""
        vectors = self.vectors(features)
        gates = self.gate(vectors.transpose(1, 2)).transpose(1, 2)
        gated = torch.cat([vectors, vectors * gates], 1)
        inputs = (gated.flatten(1), vectors.flatten(1))
        logits = [each(x) for each, x in zip(self.blocks, inputs, strict=True)]
        return torch.cat(logits, 1).mean(1, keepdim=True)


def block(widths: tuple[int, ...]) -> nn.Sequential:
    """Factorized interactions from each width to the next, and a logit."""
    layers = [FactorizedInteraction(*pair) for pair in pairwise(widths)]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 1))


class DIN(Peer):
    """The attention of an item to a history, and a deep network (Zhou et al. 2018)."""

    def __init__(self, feature_map: FeatureMap, case: ModelCase, folder: Path) -> None:
        super().__init__(feature_map, case, folder)
        ((self.history, spec),) = [
            (name, spec)
            for name, spec in feature_map.features.items()
            if spec["type"] == "sequence"
        ]
        self.item = spec["share_embedding"]
        self.attention = DIN_Attention(case.dim, list(ATTENTION_HIDDEN))
        nn.init.ones_(self.attention.attention_layer.mlp[-1].bias)
        self.deep = MLP_Block(self.width + 2 * case.dim, list(case.top), output_dim=1)

    def logits(self, features: Inputs) -> Tensor:
        """See :class:`Peer`."""
        by_name: dict[str, Tensor] = self.embedding.embedding_layer(features)
        is_there_BT = features[self.history] > 0
        interest = self.attention(by_name[self.item], by_name[self.history], is_there_BT)
        others = [by_name[name] for name in self.singles]
        product = interest * by_name[self.item]
        out: Tensor = self.deep(self.joined(features, *others, interest, product))
        return out


MODELS: dict[str, Any] = {
    "dcnv2": DCNv2,
    "deepfm": DeepFM,
    "finalmlp": FinalMLP,
    "finalnet": FinalNet,
    "din": DIN,
}
