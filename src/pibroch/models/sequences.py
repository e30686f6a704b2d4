"""What models read that attend to sequences: a vector for each item, padded to one length.

Sequences end at the last position and are padded before their first item: so a position is how long
ago an item was.

Shape legend: B samples, F features that are no sequence, D embedding width, T positions.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from pibroch.config.model import ModelConfig
from pibroch.config.model_sequences import SequenceConfig
from pibroch.errors import ConfigError
from pibroch.models.base import Embedded, Model
from pibroch.models.dropout import Dropout


class Jagged(Protocol):
    """A vector for each id of a feature, as :class:`pibroch.exchange.output.JaggedEmbeddings`."""

    def padded(self, length: int, last: bool = False) -> Tensor:
        """``[B, length, D]``."""

    def mask(self, length: int, last: bool = False) -> Tensor:
        """Bool ``[B, length]``."""

    def summed(self) -> Tensor:
        """``[B, D]``."""


ByFeature = Mapping[str, "Tensor | Jagged"]


@dataclass(frozen=True, slots=True)
class History:
    """A sequence, and the item that it is compared with.

    Attributes:
        items: ``[B, T, D]``, the last one at the last position; zeros where there is none, and
            where dropout makes some.
        looked_up: the same without dropout.
        mask: which positions hold an item, bool ``[B, T]``.
        target: ``[B, D]``.
    """

    items: Tensor
    looked_up: Tensor
    mask: Tensor
    target: Tensor


class SequenceModel(Model):
    """A model of features that are no sequence, ``[B, F, D]``, and of histories.

    Its tables pool nothing: it is called with an :class:`pibroch.exchange.output.EmbeddingOutput`,
    or what else has the vectors of each feature by its name.

    Args:
        num_dense: as for :class:`Model`.
        num_features: all.
        config: its section.
        features: their names.

    Raises:
        ConfigError: for histories that are no features, or none.
    """

    section: ClassVar[type[ModelConfig]] = SequenceConfig
    pools = False

    def __init__(
        self, num_dense: int, num_features: int, config: SequenceConfig, features: Sequence[str]
    ) -> None:
        super().__init__(num_dense, num_features, config)
        self.targets = config.histories
        self.max_length = config.max_length
        if not self.targets:
            raise ConfigError(
                f"no model.histories for {config.name}",
                "at least one",
                'name it and the item that it is compared with: model.histories={history="item"}',
            )
        self.others = tuple(name for name in features if name not in self.targets)
        for key, names, choice in (
            ("sequence", self.targets.keys(), features),
            ("item", self.targets.values(), self.others),
        ):
            if odd := sorted(set(names) - set(choice)):
                raise ConfigError(
                    f"{key} {odd[0]!r} in model.histories",
                    f"one of {', '.join(choice)}",
                    "correct the name",
                )
        self.history_dropouts = nn.ModuleList(
            Dropout(config.embedding_dropout) for _ in self.targets
        )

    @classmethod
    def build(
        cls, num_dense: int, num_features: int, config: ModelConfig, features: Sequence[str]
    ) -> Self:
        """See :class:`Model`; histories are features' names."""
        assert isinstance(config, SequenceConfig), "a model's section is its own"
        return cls(num_dense, num_features, config, features)

    def forward(
        self, dense: Tensor, embedded: Embedded | ByFeature | Callable[[], ByFeature]
    ) -> Tensor:
        """Logits ``[B]`` from ``dense`` ``[B, n]`` and each feature's vectors by its name.

        Raises:
            DataError: when the shape of ``dense`` is not the one the model was built for.
            KeyError: for vectors that lack a feature.
        """
        self._check_dense(dense)
        return self.logits(dense, embedded if callable(embedded) else lambda: embedded)

    def logits(self, dense: Tensor, embeddings: Callable[[], Tensor | ByFeature]) -> Tensor:  # noqa: D102
        by_name = embeddings()
        if isinstance(by_name, Tensor):
            raise ConfigError(
                f"one tensor of embeddings for {type(self).__name__}",
                "the vectors of each feature by its name",
                'look up in tables with pooling="none"',
            )
        vectors = {name: summed(by_name[name]) for name in self.others}
        histories = self.histories(by_name)
        others = self.embedding_dropout(torch.stack(list(vectors.values()), 1))
        return self.scores(dense, others, histories)

    def histories(self, by_name: ByFeature) -> list[History]:
        """Those of the section, in its order.

        Raises:
            KeyError: for vectors that lack a feature.
        """
        length = self.max_length
        found = []
        for (name, target), dropout in zip(
            self.targets.items(), self.history_dropouts, strict=True
        ):
            vectors = by_name[name]
            assert not isinstance(vectors, Tensor), "tables that pool nothing"
            items = vectors.padded(length, last=True)
            mask = vectors.mask(length, last=True)
            found.append(History(dropout(items), items, mask, summed(by_name[target])))
        return found

    @abstractmethod
    def scores(self, dense: Tensor, others: Tensor, histories: Sequence[History]) -> Tensor:
        """Logits ``[B]``.

        Args:
            dense: ``[B, n]``.
            others: ``[B, F, D]``, features that are no sequence.
            histories: in the order of the section's.
        """


def summed(vectors: Tensor | Jagged) -> Tensor:
    """``[B, D]`` of a feature that is no sequence."""
    return vectors if isinstance(vectors, Tensor) else vectors.summed()
