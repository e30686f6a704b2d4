"""DIN: a sequence becomes the sum of its items, weighed by how they go with the item in question.

Zhou et al., "Deep Interest Network for Click-Through Rate Prediction", KDD 2018. The interest of a
user with items ``h_t`` in an item ``q`` is ``u = sum_t a(h_t, q) h_t`` (Eq. 3); a is a network that
sees ``[q, h_t, q - h_t, q * h_t]``. The logit is that of a network that sees the interests, their
products with the items, all other features' embeddings and the dense features.

Differs from the paper: activations are those of the section, which has no Dice, and no
regularisation is aware of mini-batches (updates of rows touch those of the batch alone). ``a`` sees
``q - h_t`` and ``q * h_t`` as the authors' code does; the paper has an outer product. The products
``u * q`` are the authors' code's, too: without them the network has to learn to multiply before it
can tell how much of an interest speaks for the item.

Shape legend: B samples, F features that are no sequence, D embedding width, n dense features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pibroch.config.model_sequences import DINConfig
from pibroch.models.attention import TargetAttention
from pibroch.models.mlp import MLP, HiddenOptions
from pibroch.models.sequences import History, SequenceModel


class DIN(SequenceModel):
    """Target attention and a deep network."""

    section = DINConfig

    def __init__(
        self, num_dense: int, num_features: int, config: DINConfig, features: Sequence[str]
    ) -> None:
        super().__init__(num_dense, num_features, config, features)
        self.attention = nn.ModuleList(
            TargetAttention(
                config.dim,
                config.attention_hidden,
                HiddenOptions(config.activation),
                config.attention_softmax,
            )
            for _ in self.targets
        )
        width = (num_features + len(self.targets)) * config.dim + num_dense
        self.deep = MLP((width, *config.top, 1), HiddenOptions.of(config))

    def scores(self, dense: Tensor, others: Tensor, histories: Sequence[History]) -> Tensor:  # noqa: D102
        interests = [
            attention(each.items, each.mask, each.target)
            for attention, each in zip(self.attention, histories, strict=True)
        ]
        products = [
            interest * each.target for interest, each in zip(interests, histories, strict=True)
        ]
        out: Tensor = self.deep(torch.cat([others.flatten(1), *interests, *products, dense], 1))
        return out.squeeze(1)
