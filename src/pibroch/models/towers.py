"""Towers: features in groups, and a dense module that makes fewer or shorter vectors of each.

DMT, Sec. 3.2 and 4.

A tower is a property of the model: the same numbers under any exchange and any number of ranks.

Shape legend: B samples, F features, F_t of them in tower t, N width of embeddings, G vectors of
width D that towers give.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from pibroch.config.model import (
    ModelConfig,
    TowerConfig,
    TowerDCNConfig,
    TowerDLRMConfig,
    TowersConfig,
)
from pibroch.errors import ConfigError
from pibroch.models.base import Embedded, Model
from pibroch.models.dcnv2 import CrossNet
from pibroch.models.interaction import dot_interaction
from pibroch.models.linear import Linear
from pibroch.models.mlp import MLP, HiddenOptions


class TowerModule(nn.Module, ABC):
    """What one tower makes of its embeddings; a module of one's own derives from it.

    Attributes:
        num_outputs: vectors that it gives.
    """

    num_outputs: int

    @abstractmethod
    def forward(self, embedded: Tensor) -> Tensor:
        """``[B, F_t, N]`` to ``[B, num_outputs, D]``."""


class PassThrough(TowerModule):
    """All embeddings as they are."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_outputs = num_features

    def forward(self, embedded: Tensor) -> Tensor:
        """See :class:`TowerModule`; D is N."""
        return embedded


class LinearTower(TowerModule):
    """Combinations of a tower's embeddings, and a projection of each: the tower of DLRM (Sec. 4).

    One projection serves all features of the tower, which gives the figures of the paper's Table 5
    to the digit.

    Args:
        num_features: F_t.
        dim: N.
        width: D.
        combined: vectors that are combinations of all (``c``).
        projected: vectors of each embedding (``p``).
    """

    def __init__(
        self, num_features: int, dim: int, width: int, combined: int, projected: int
    ) -> None:
        super().__init__()
        if not combined and not projected:
            raise ConfigError(
                "towers that give nothing",
                "combined or projected vectors",
                "set one of them above 0",
            )
        self.width = width
        self.combined = combined
        self.projected = projected
        self.combine = Linear(num_features * dim, combined * width) if combined else None
        self.project = Linear(dim, projected * width) if projected else None
        self.num_outputs = combined + projected * num_features

    def forward(self, embedded: Tensor) -> Tensor:
        """See :class:`TowerModule`."""
        num_samples = len(embedded)
        parts = []
        if self.combine is not None:
            parts.append(
                self.combine(embedded.flatten(1)).view(num_samples, self.combined, self.width)
            )
        if self.project is not None:
            flat = self.project(embedded.reshape(-1, embedded.shape[2]))
            parts.append(flat.view(num_samples, self.projected * embedded.shape[1], self.width))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


class CrossTower(TowerModule):
    """One cross over all embeddings of the tower, projected to one vector.

    The tower of DCN (Sec. 4).

    Args:
        num_features: F_t.
        dim: N.
        width: D.
        rank: of the cross's matrix, whole when absent.
    """

    num_outputs = 1

    def __init__(self, num_features: int, dim: int, width: int, rank: int | None) -> None:
        super().__init__()
        self.cross = CrossNet(num_features * dim, 1, rank)
        self.project = Linear(num_features * dim, width)

    def forward(self, embedded: Tensor) -> Tensor:
        """See :class:`TowerModule`."""
        out: Tensor = self.project(self.cross(embedded.flatten(1)))
        return out[:, None]


class Towers(nn.Module):
    """All towers side by side: ``[B, F, N]`` to ``[B, G, D]``, tower by tower.

    Args:
        groups: numbers of each tower's features.
        make: the module of a tower with so many features.

    Example: ``Towers([[0, 2], [1]], lambda num_features: LinearTower(num_features, 16, 8, 0, 1))``.
    """

    def __init__(self, groups: Sequence[Sequence[int]], make: Callable[[int], TowerModule]) -> None:
        super().__init__()
        self.groups = [list(group) for group in groups]
        self.towers = nn.ModuleList(make(len(group)) for group in self.groups)
        self.num_outputs = sum(
            tower.num_outputs for tower in self.towers if isinstance(tower, TowerModule)
        )
        self._is_in_order = [number for group in self.groups for number in group] == list(
            range(sum(map(len, groups)))
        )

    def forward(self, embedded: Tensor) -> Tensor:
        """``[B, F, N]`` to ``[B, G, D]``."""
        if self._is_in_order:
            parts = embedded.split([len(group) for group in self.groups], 1)
        else:
            parts = tuple(embedded[:, group] for group in self.groups)
        return torch.cat([tower(part) for tower, part in zip(self.towers, parts, strict=True)], 1)


class TowerModel(Model):
    """A model on towers.

    Args:
        num_dense: as for :class:`Model`.
        num_features: F.
        config: widths; ``towers`` says what they make.
        groups: numbers of each tower's features; by ``config`` when absent, for features that have
            no names.
    """

    section: ClassVar[type[TowerConfig]] = TowerConfig

    def __init__(
        self,
        num_dense: int,
        num_features: int,
        config: TowerConfig,
        groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__(num_dense, num_features, config)
        if groups is None:
            groups = config.towers.numbers(tuple(map(str, range(num_features))))
        width = config.towers.width
        self.width = config.dim if width is None or config.towers.pass_through else width
        self.towers = Towers(groups, lambda count: self._tower(count, config.towers))
        self.bottom: MLP | None = None
        if num_dense:
            self.bottom = MLP(
                (num_dense, *config.bottom, self.width), HiddenOptions(config.activation), True
            )
        else:
            self.constant = nn.Parameter(torch.randn(self.width) / self.width**0.5)

    @classmethod
    def build(
        cls, num_dense: int, num_features: int, config: ModelConfig, features: Sequence[str]
    ) -> Self:
        """See :class:`Model`; towers may be grouped by the features' names."""
        assert isinstance(config, TowerConfig), "a model's section is its own"
        groups = config.towers.numbers(tuple(features)) if features else None
        return cls(num_dense, num_features, config, groups)

    def _embeddings(self, embedded: Embedded, num_samples: int) -> Tensor:
        if isinstance(self.towers, Towers):
            return super()._embeddings(embedded, num_samples)
        # of other samples, see place_towers
        return embedded if isinstance(embedded, Tensor) else embedded()

    def bottom_vector(self, dense: Tensor) -> Tensor:
        """``[B, D]`` of the dense features, or learned where there are none."""
        return (
            self.constant.expand(dense.shape[0], -1) if self.bottom is None else self.bottom(dense)
        )

    def _tower(self, num_features: int, towers: TowersConfig) -> TowerModule:
        return (
            PassThrough(num_features)
            if towers.pass_through
            else self.make_tower(num_features, towers)
        )

    @abstractmethod
    def make_tower(self, num_features: int, towers: TowersConfig) -> TowerModule:
        """The module of a tower with so many features."""

    @property
    def compression(self) -> float:
        """Numbers that come into the towers by those that leave them (``CR``)."""
        return self.num_features * self.config.dim / (self.towers.num_outputs * self.width)


class TowerDLRM(TowerModel):
    """DLRM on towers.

    Dot products of all pairs of what the towers give and the bottom vector, of width D too.
    """

    section = TowerDLRMConfig

    def __init__(
        self,
        num_dense: int,
        num_features: int,
        config: TowerConfig,
        groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__(num_dense, num_features, config, groups)
        num_pairs = self.towers.num_outputs * (self.towers.num_outputs + 1) // 2
        self.top = MLP((self.width + num_pairs, *config.top, 1), HiddenOptions.of(config))

    @property
    def interaction_products(self) -> int:
        """See :class:`Model`."""
        return (self.towers.num_outputs + 1) ** 2 * self.width

    def make_tower(self, num_features: int, towers: TowersConfig) -> TowerModule:
        """See :class:`TowerModel`."""
        return LinearTower(
            num_features, self.config.dim, self.width, towers.combined, towers.projected
        )

    def logits(self, dense: Tensor, embeddings: Callable[[], Tensor]) -> Tensor:  # noqa: D102
        bottom = self.bottom_vector(dense)
        out: Tensor = self.top(dot_interaction(bottom, self.towers(embeddings())))
        return out.squeeze(1)


class TowerDCN(TowerModel):
    """DCN on towers.

    Crosses over the vectors of all towers and the bottom one, and a deep network on them.
    """

    section = TowerDCNConfig

    def __init__(
        self,
        num_dense: int,
        num_features: int,
        config: TowerDCNConfig,
        groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__(num_dense, num_features, config, groups)
        width = (self.towers.num_outputs + 1) * self.width
        self.cross = CrossNet(width, config.cross_layers, config.cross_rank)
        self.top = MLP((width, *config.top, 1), HiddenOptions.of(config))

    def make_tower(self, num_features: int, towers: TowersConfig) -> TowerModule:
        """See :class:`TowerModel`."""
        return CrossTower(num_features, self.config.dim, self.width, towers.rank)

    def logits(self, dense: Tensor, embeddings: Callable[[], Tensor]) -> Tensor:  # noqa: D102
        bottom = self.bottom_vector(dense)
        out: Tensor = self.top(
            self.cross(torch.cat([bottom, self.towers(embeddings()).flatten(1)], 1))
        )
        return out.squeeze(1)
