"""SASRec: self-attention makes a vector of a sequence, whose product with an item's scores it.

Kang and McAuley, "Self-Attentive Sequential Recommendation", ICDM 2018. To items positions are
added (Eq. 1); in blocks of self-attention (Eq. 2 to 4, Sec. III-C) each position reads itself and
those before it. The logit of item ``q`` is ``r_T . q`` (Eq. 6), where ``r_T`` is the vector of the
last item.

Differs from the paper: a sample is a sequence and one item with a label; ``all_positions`` trains
all positions of a sequence at once, as the paper does (Sec. III-E), under ``in_batch_softmax``,
whose negatives are the other items of the batch. Embeddings are not multiplied by ``sqrt(D)``.
Other features and dense ones are not read.

Shape legend: B samples, D embedding width, T positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pibroch.config.model_sequences import SASRecConfig
from pibroch.errors import ConfigError
from pibroch.models.attention import TransformerBlock
from pibroch.models.layer_norm import LayerNorm
from pibroch.models.pairs import EmbeddedBatch, PairModel, Pairs
from pibroch.models.sequences import History, SequenceModel, summed


class SASRec(SequenceModel, PairModel):
    """Causal self-attention over one sequence, which is the user."""

    section = SASRecConfig

    def __init__(
        self, num_dense: int, num_features: int, config: SASRecConfig, features: Sequence[str]
    ) -> None:
        super().__init__(num_dense, num_features, config, features)
        if len(self.targets) > 1:
            raise ConfigError(
                f"{len(self.targets)} sequences in model.histories for sasrec",
                "one",
                "keep one of them, or choose din or bst",
            )
        self.item_features = tuple(self.targets.values())
        self.vector_width = config.dim
        self.sequence = next(iter(self.targets)) if config.all_positions else None
        self.positions = nn.Parameter(torch.randn(config.max_length, config.dim) / config.dim**0.5)
        self.blocks = nn.ModuleList(
            TransformerBlock(config.dim, config.attention_heads, config.dropout, norm_first=True)
            for _ in range(config.blocks)
        )
        self.norm = LayerNorm(config.dim)

    def scores(self, dense: Tensor, others: Tensor, histories: Sequence[History]) -> Tensor:  # noqa: D102
        (history,) = histories
        if self.sequence is None or not self.training:
            return self.products(Pairs(self._user(history), history.target))
        users: Tensor = self.norm(self._outputs(history)) * history.mask[:, :, None]
        following = torch.cat([history.looked_up[:, 1:], history.target[:, None]], 1)
        is_read = history.mask.clone()
        is_read[:, -1] = True  # also of a sample without history
        self.keep(Pairs(users[is_read], following[is_read]))
        return (users[:, -1] * history.target).sum(1)

    def user_vectors(self, dense: Tensor, embedded: EmbeddedBatch) -> Tensor:
        """See :class:`PairModel`."""
        assert not isinstance(embedded, Tensor), "of tables that pool nothing"
        (history,) = self.histories(embedded)
        return self._user(history)

    def item_vectors(self, embedded: EmbeddedBatch) -> Tensor:
        """See :class:`PairModel`."""
        assert not isinstance(embedded, Tensor), "of tables that pool nothing"
        return summed(embedded[self.item_id])

    def _user(self, history: History) -> Tensor:
        last: Tensor = self.norm(self._outputs(history)[:, -1]) * history.mask[:, -1:]
        return last

    def _outputs(self, history: History) -> Tensor:
        """``[B, T, D]``."""
        length = history.mask.shape[1]
        is_before = torch.ones(length, length, dtype=torch.bool, device=history.mask.device).tril()
        x = history.items + self.positions
        for block in self.blocks:
            x = block(x, history.mask[:, None] & is_before)
        return x
