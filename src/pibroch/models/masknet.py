"""MaskNet: layers whose inputs are multiplied with a mask that the embeddings decide.

Wang et al., "MaskNet: Introducing Feature-Wise Multiplication to CTR Ranking Models by
Instance-Guided Mask", DLP-KDD 2021. The instance-guided mask (Sec. 3.2) of the embeddings ``v`` is
``m = W_2 relu(W_1 v + b_1) + b_2``; a MaskBlock (Sec. 3.3) gives ``act(LN(W (m * h)))``. The first
``h`` is ``v``, each field's vector normalised. In the serial model (Sec. 3.4, structure
``stacked``) the next block's h is what the last one gave; in the parallel one all blocks have the
first h, and a deep network is on what they give side by side.

Shape legend: B samples, F fields, D embedding width, K = F D, H and O widths of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from pibroch.config.model_zoo import MaskNetConfig
from pibroch.models.base import Model
from pibroch.models.dropout import Dropout
from pibroch.models.fields import Fields
from pibroch.models.layer_norm import LayerNorm
from pibroch.models.linear import Linear
from pibroch.models.mlp import ACTIVATIONS, MLP, HiddenOptions


class MaskBlock(nn.Module):
    """``act(LN(W (m(v) * h)))``, then dropout.

    Args:
        width: K.
        width_in: H.
        width_out: O.
        config: activation, dropout, and how wide the mask's hidden layer is.
    """

    def __init__(self, width: int, width_in: int, width_out: int, config: MaskNetConfig) -> None:
        super().__init__()
        self.mask = MLP((width, max(1, int(width_in * config.mask_ratio)), width_in))
        self.linear = Linear(width_in, width_out, bias=False)
        self.norm = LayerNorm(width_out)
        self.activation = config.activation
        self.dropout = Dropout(config.dropout)

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """``[B, K]`` and ``[B, H]`` to ``[B, O]``."""
        masked = self.mask(embedded) * hidden
        out: Tensor = self.dropout(ACTIVATIONS[self.activation](self.norm(self.linear(masked))))
        return out


class MaskNet(Model):
    """MaskBlocks one after the other, or side by side under a deep network."""

    section = MaskNetConfig

    def __init__(self, num_dense: int, num_features: int, config: MaskNetConfig) -> None:
        super().__init__(num_dense, num_features, config)
        self.fields = Fields(num_dense, num_features, config.dim)
        self.norm = LayerNorm(self.fields.count, config.dim)
        width = self.fields.count * config.dim
        self.is_parallel = config.structure == "parallel"
        if self.is_parallel:
            widths = [(width, config.mask_width)] * config.mask_blocks
            deep = (config.mask_width * config.mask_blocks, *config.top, 1)
        else:
            widths = list(pairwise((width, *config.top)))
            deep = (config.top[-1] if config.top else width, 1)
        self.blocks = nn.ModuleList(MaskBlock(width, i, o, config) for i, o in widths)
        self.deep = MLP(deep, HiddenOptions.of(config))

    def logits(self, dense: Tensor, embeddings: Callable[[], Tensor]) -> Tensor:  # noqa: D102
        vectors = self.fields(dense, embeddings())
        embedded = vectors.flatten(1)
        hidden = self.norm(vectors).flatten(1)
        if self.is_parallel:
            hidden = torch.cat([block(embedded, hidden) for block in self.blocks], 1)
        else:
            for block in self.blocks:
                hidden = block(embedded, hidden)
        out: Tensor = self.deep(hidden)
        return out.squeeze(1)
