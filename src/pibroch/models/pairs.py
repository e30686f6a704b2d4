"""Models whose logit is the product of a user's vector and an item's.

Item vectors need no user, so that a loss can compare each user with all items of a batch, and an
index can hold all items.

Shape legend: B samples, n dense features, F categorical features, D embedding width, E width of a
vector, U distinct items.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pibroch.models.base import Model

EmbeddedBatch = Tensor | Mapping[str, Any]
"""``[B, F, D]``; of a model of sequences the vectors of each feature by its name."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """The two sides of a batch: P pairs, one a sample unless the model learns from sequences.

    Attributes:
        users: ``[P, E]``.
        items: ``[P, E]``.
    """

    users: Tensor
    items: Tensor


@dataclass(frozen=True, slots=True)
class DistinctItems:
    """The U items of some samples.

    Attributes:
        ids: ascending, int64 ``[U]``.
        places: of each sample's item, ``[B]``.
        counts: samples of each, ``[U]``.
        firsts: the first sample of each, ``[U]``.
    """

    ids: Tensor
    places: Tensor
    counts: Tensor
    firsts: Tensor

    @classmethod
    def of(cls, ids: Tensor) -> DistinctItems:
        """Of the items of the samples, int64 ``[B]``."""
        distinct, places, counts = ids.unique(return_inverse=True, return_counts=True)
        firsts = places.argsort(stable=True)[counts.cumsum(0) - counts]
        return cls(distinct, places, counts, firsts)


class PairModel(Model):
    """Makes a vector of a user and one of an item.

    Attributes:
        item_features: what an item's vector is made of, its id first; all other features are the
            user's.
        vector_width: E.
        sequence: where a sample has more pairs than that of its item, the feature whose items are
            such, too: each but the first of the last ``max_length``, before the sample's own.
        max_length: see there.
        keeps_pairs: whether training keeps the vectors of a forward pass for :meth:`take_pairs`.
        item_ids: of the samples of the next forward pass in training, int64 ``[B]``, where a loss
            compares items; then an item's vector may be computed once for all its samples.
    """

    item_features: tuple[str, ...]
    vector_width: int
    sequence: str | None = None
    max_length: int = 0
    keeps_pairs = False
    item_ids: Tensor | None = None
    _pairs: Pairs | None = None

    @property
    def item_id(self) -> str:
        """The feature that tells items apart."""
        return self.item_features[0]

    @property
    def interaction_products(self) -> int:
        """See :class:`Model`."""
        return self.vector_width

    @abstractmethod
    def user_vectors(self, dense: Tensor, embedded: EmbeddedBatch) -> Tensor:
        """``[B, E]`` of ``dense`` ``[B, n]`` and embeddings; item features are not read."""

    @abstractmethod
    def item_vectors(self, embedded: EmbeddedBatch) -> Tensor:
        """``[B, E]`` of embeddings; user features are not read."""

    def keep(self, pairs: Pairs) -> Pairs:
        """For a loss that compares pairs, which may take these afterwards; returns them."""
        if self.training and self.keeps_pairs:
            self._pairs = pairs
        return pairs

    def products(self, pairs: Pairs) -> Tensor:
        """Logits ``[B]`` of pairs of one sample each, which are kept."""
        self.keep(pairs)
        return (pairs.users * pairs.items).sum(1)

    def take_pairs(self) -> Pairs:
        """The vectors of the last forward pass in training, once."""
        pairs = self._pairs
        self._pairs = None
        assert pairs is not None, "asked once, after a forward pass"
        return pairs
