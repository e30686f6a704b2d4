"""FinalMLP: two networks that see features through gates of their own, and a bilinear fusion.

Mao et al., "FinalMLP: An Enhanced Two-Stream MLP Model for CTR Prediction", AAAI 2023. With ``x``
all features, ``o_s = MLP_s(2 sigmoid(Gate_s(c_s)) * x)`` for the streams ``s = 1, 2`` (stream-
specific feature selection), and the logit ``b + w_1 o_1 + w_2 o_2 + sum_h o_{1,h}^T W_h o_{2,h}``
(multi-head bilinear fusion).

Differs from the paper: a context ``c_s`` is the embeddings of some features, which have no tables
of their own as contexts; dense features enter as they are, as in DCNv2.

Shape legend: B samples, F features, D embedding width, K inputs, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor, nn

from pibroch.config.model import ModelConfig
from pibroch.config.model_zoo import FinalMLPConfig
from pibroch.errors import ConfigError
from pibroch.models.base import Model
from pibroch.models.linear import Linear
from pibroch.models.mlp import MLP, HiddenOptions


class ContextGate(nn.Module):
    """``2 sigmoid(MLP(c)) * x``, where c is some features' embeddings, or a learned vector.

    Args:
        context: numbers of these features; none for a learned vector.
        dim: D.
        hidden: widths of the gate's hidden layers.
        width: K.
    """

    def __init__(self, context: Sequence[int], dim: int, hidden: Sequence[int], width: int) -> None:
        super().__init__()
        self.context = list(context)
        if not context:
            self.constant = nn.Parameter(torch.randn(dim) / dim**0.5)
        self.gate = MLP((max(1, len(context)) * dim, *hidden, width))

    def forward(self, vectors: Tensor, x: Tensor) -> Tensor:
        """``[B, F, D]`` and ``[B, K]`` to ``[B, K]``."""
        context = vectors[:, self.context].flatten(1) if self.context else self.constant[None]
        gates: Tensor = self.gate(context)
        return 2 * gates.sigmoid() * x


class BilinearFusion(nn.Module):
    """``b + w_1 x + w_2 y + sum_h x_h^T W_h y_h``.

    Args:
        first: width of x.
        second: width of y.
        heads: H, which divides both.

    Raises:
        ConfigError: when it does not.
    """

    def __init__(self, first: int, second: int, heads: int) -> None:
        super().__init__()
        if first % heads or second % heads:
            raise ConfigError(
                f"{heads} heads for streams of widths {first} and {second}",
                "heads that divide both",
                "set model.heads to 1, or change the last width",
            )
        self.first = Linear(first, 1)
        self.second = Linear(second, 1, bias=False)
        shape = (heads, first // heads, second // heads)
        self.products = nn.Parameter(torch.randn(shape) * (2 * heads / (first * second)) ** 0.5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """``[B, first]`` and ``[B, second]`` to ``[B]``."""
        heads, first, second = self.products.shape
        by_head = torch.einsum("bhi,hij->bhj", x.view(-1, heads, first), self.products)
        fused = (by_head * y.view(-1, heads, second)).sum((1, 2))
        out: Tensor = (self.first(x) + self.second(y)).squeeze(1) + fused
        return out


class FinalMLP(Model):
    """Two streams and their fusion.

    Args:
        num_dense: as for :class:`Model`.
        num_features: F.
        config: its section.
        contexts: numbers of the features that are each gate's context; by ``config`` when absent,
            for features that have no names.
    """

    section = FinalMLPConfig

    def __init__(
        self,
        num_dense: int,
        num_features: int,
        config: FinalMLPConfig,
        contexts: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__(num_dense, num_features, config)
        width = num_features * config.dim + num_dense
        if contexts is None:
            contexts = config.context_numbers(tuple(map(str, range(num_features))))
        self.gates = nn.ModuleList()
        if config.gate:
            self.gates.extend(
                ContextGate(context, config.dim, config.gate_hidden, width) for context in contexts
            )
        options = HiddenOptions.of(config)
        tops = (config.top, config.top if config.second_top is None else config.second_top)
        self.streams = nn.ModuleList(MLP((width, *top), options, True) for top in tops)
        first, second = (top[-1] if top else width for top in tops)
        self.fusion = BilinearFusion(first, second, config.heads)
        self._products = first * second // config.heads

    @classmethod
    def build(
        cls, num_dense: int, num_features: int, config: ModelConfig, features: Sequence[str]
    ) -> Self:
        """See :class:`Model`; contexts are features' names."""
        assert isinstance(config, FinalMLPConfig), "a model's section is its own"
        contexts = config.context_numbers(tuple(features)) if features else None
        return cls(num_dense, num_features, config, contexts)

    @property
    def interaction_products(self) -> int:
        """See :class:`Model`; those of the fusion."""
        return self._products

    def logits(self, dense: Tensor, embeddings: Callable[[], Tensor]) -> Tensor:  # noqa: D102
        vectors = embeddings()
        x = torch.cat([vectors.flatten(1), dense], 1)
        inputs = [gate(vectors, x) for gate in self.gates] or [x, x]
        first, second = (stream(each) for stream, each in zip(self.streams, inputs, strict=True))
        out: Tensor = self.fusion(first, second)
        return out
