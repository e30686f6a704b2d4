"""Two towers: a user's vector and an item's, whose product is the logit.

Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations", RecSys
2019, Sec. 3: ``s(x, y) = <u(x), v(y)>``, of vectors of length 1 and divided by a temperature where
the recipe says so (Sec. 5.1). Item vectors need no user, so that an index can hold them.

Shape legend: B samples, n dense features, F categorical features, D embedding width, E width of a
vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from pibroch.config.model_two_tower import TwoTowerConfig
from pibroch.errors import ConfigError
from pibroch.models.mlp import MLP, HiddenOptions
from pibroch.models.pairs import DistinctItems, EmbeddedBatch, PairModel, Pairs


class TwoTower(PairModel):
    """A network over user and dense features, and one over item features.

    Args:
        num_dense: as for :class:`Model`; the user's.
        num_features: all.
        config: its section.
        features: their names, by which the section says which are the item's; without them the last
            one is.

    Raises:
        ConfigError: for item features that are none, or all.
    """

    section = TwoTowerConfig

    def __init__(
        self,
        num_dense: int,
        num_features: int,
        config: TwoTowerConfig,
        features: Sequence[str] = (),
    ) -> None:
        super().__init__(num_dense, num_features, config)
        names = features or [f"feature {number}" for number in range(num_features)]
        wanted = config.item_features or (names[-1],)
        if unknown := [name for name in wanted if name not in names]:
            raise ConfigError(
                f"the item feature {unknown[0]!r}",
                f"one of {', '.join(names)[:400]}",
                "correct model.item_features",
            )
        users = [number for number, name in enumerate(names) if name not in wanted]
        if not users and not num_dense:
            raise ConfigError(
                "a two_tower all of whose features are the item's",
                "features of the user",
                "leave some out of model.item_features",
            )
        self.item_features = tuple(wanted)
        self._users = users
        self._items = [names.index(name) for name in wanted]
        self.temperature = config.temperature
        self.normalize = config.normalize
        self.vector_width = config.vector_width
        options = HiddenOptions.of(config)
        ends = (*config.top, config.vector_width)
        self.user = MLP((num_dense + len(users) * config.dim, *ends), options)
        self.item = MLP((len(wanted) * config.dim, *ends), options)

    @classmethod
    def build(
        cls,
        num_dense: int,
        num_features: int,
        config: TwoTowerConfig,  # type: ignore[override]
        features: Sequence[str],
    ) -> Self:
        """See :meth:`Model.build`."""
        return cls(num_dense, num_features, config, features)

    def user_vectors(self, dense: Tensor, embedded: EmbeddedBatch) -> Tensor:
        """See :class:`PairModel`; divided by the temperature."""
        inputs = torch.cat([dense, self._of(embedded)[:, self._users].flatten(1)], 1)
        return self._scaled(self.user(inputs)) / self.temperature

    def item_vectors(self, embedded: EmbeddedBatch) -> Tensor:
        """See :class:`PairModel`.

        Where training compares items, an item is computed once for all its samples, which share its
        dropout on whichever ranks they lie; not under batch norm, whose moments are of samples.
        """
        inputs = self._of(embedded)[:, self._items].flatten(1)
        if not self.training or self.item_ids is None or self.item.options.batch_norm:
            return self._scaled(self.item(inputs))
        by_item = DistinctItems.of(self.item_ids)
        firsts = by_item.firsts.to(inputs.device)
        places = by_item.places.to(inputs.device)
        once = inputs[firsts]
        if not torch.equal(once[places], inputs):  # other features differ among its samples
            return self._scaled(self.item(inputs, self.item_ids))
        return self._scaled(self.item(once, by_item.ids)).index_select(0, places)

    @staticmethod
    def _of(embedded: EmbeddedBatch) -> Tensor:
        assert isinstance(embedded, Tensor), "of tables that pool"
        return embedded

    def _scaled(self, vectors: Tensor) -> Tensor:
        return functional.normalize(vectors, dim=1) if self.normalize else vectors

    def logits(self, dense: Tensor, embeddings: Callable[[], Tensor]) -> Tensor:  # noqa: D102
        vectors = embeddings()
        return self.products(Pairs(self.user_vectors(dense, vectors), self.item_vectors(vectors)))
