"""BST: a transformer over a sequence and the item in question, under a deep network.

Chen et al., "Behavior Sequence Transformer for E-commerce Recommendation in Alibaba", DLP-KDD 2019.
To the items ``h_1 ... h_T`` of a sequence and the item in question behind them positions are added;
blocks of self-attention (Eq. 2 to 4) give a vector for each, and the logit is that of a network
that sees all of these, the other features' embeddings and the dense features.

Differs from the paper: a position is the number of items since, not the time; it is added to an
embedding of the same width instead of standing beside it; networks have ReLU, not LeakyReLU.

Shape legend: B samples, F features that are no sequence, D embedding width, T positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pibroch.config.model_sequences import BSTConfig
from pibroch.models.attention import TransformerBlock
from pibroch.models.mlp import MLP, HiddenOptions
from pibroch.models.sequences import History, SequenceModel


class Encoder(nn.Module):
    """Blocks over one sequence and its item.

    Args:
        config: the model's section.
    """

    def __init__(self, config: BSTConfig) -> None:
        super().__init__()
        self.positions = nn.Parameter(
            torch.randn(config.max_length + 1, config.dim) / config.dim**0.5
        )
        self.blocks = nn.ModuleList(
            TransformerBlock(config.dim, config.attention_heads, config.dropout, norm_first=False)
            for _ in range(config.blocks)
        )

    def forward(self, history: History) -> Tensor:
        """``[B, (T + 1) D]``, zeros where there is no item."""
        x = torch.cat([history.items, history.target[:, None]], 1) + self.positions
        mask = torch.cat([history.mask, torch.ones_like(history.mask[:, :1])], 1)
        for block in self.blocks:
            x = block(x, mask[:, None])
        return (x * mask[:, :, None]).flatten(1)


class BST(SequenceModel):
    """Transformers and a deep network."""

    section = BSTConfig

    def __init__(
        self, num_dense: int, num_features: int, config: BSTConfig, features: Sequence[str]
    ) -> None:
        super().__init__(num_dense, num_features, config, features)
        self.encoders = nn.ModuleList(Encoder(config) for _ in self.targets)
        num_vectors = len(self.others) + len(self.targets) * (config.max_length + 1)
        width = num_vectors * config.dim + num_dense
        self.deep = MLP((width, *config.top, 1), HiddenOptions.of(config))

    def scores(self, dense: Tensor, others: Tensor, histories: Sequence[History]) -> Tensor:  # noqa: D102
        encoded = [encoder(each) for encoder, each in zip(self.encoders, histories, strict=True)]
        out: Tensor = self.deep(torch.cat([others.flatten(1), *encoded, dense], 1))
        return out.squeeze(1)
