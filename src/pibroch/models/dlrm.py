"""DLRM (Naumov et al. 2019): bottom network, dot interaction, top network."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pibroch.config.model import DLRMConfig
from pibroch.models.base import Model
from pibroch.models.interaction import dot_interaction
from pibroch.models.mlp import MLP, HiddenOptions


class DLRM(Model):
    """The dense features become one more vector of width D.

    The dot products of all pairs enter the top network.

    Without dense features that vector is learned directly, so that each id keeps a first-order
    term.
    """

    section = DLRMConfig

    def __init__(self, num_dense: int, num_features: int, config: DLRMConfig) -> None:
        super().__init__(num_dense, num_features, config)
        dim = config.dim
        num_pairs = num_features * (num_features + 1) // 2
        self.bottom: MLP | None = None
        if num_dense:
            widths = (num_dense, *config.bottom, dim)
            self.bottom = MLP(widths, HiddenOptions(config.activation), last_is_hidden=True)
        else:
            self.constant = nn.Parameter(torch.randn(dim) / dim**0.5)
        self.top = MLP((dim + num_pairs, *config.top, 1), HiddenOptions.of(config))

    def logits(self, dense: Tensor, embeddings: Callable[[], Tensor]) -> Tensor:  # noqa: D102
        return self._top(self.dense_part(dense), embeddings())

    def dense_part(self, dense: Tensor) -> Tensor:  # noqa: D102
        return (
            self.bottom(dense)
            if self.bottom is not None
            else self.constant.expand(dense.shape[0], -1)
        )

    def finish(self, dense: Tensor, begun: Tensor | None, embedded: Tensor) -> Tensor:  # noqa: D102
        if begun is None:
            return super().finish(dense, begun, embedded)
        return self._top(begun, self._embeddings(embedded, dense.shape[0]))

    @property
    def interaction_products(self) -> int:
        """See :class:`Model`; all vectors with all of them, as one product."""
        return (self.num_features + 1) ** 2 * self.config.dim

    def _top(self, bottom: Tensor, vectors: Tensor) -> Tensor:
        out: Tensor = self.top(dot_interaction(bottom, vectors))
        return out.squeeze(1)
