"""The embedding tables of a run: initial values, optimizer, exchange. Their width is the model's ``dim``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pibroch.config.base import Section
from pibroch.config.optimizer import SparseAdamConfig, SparseOptimizerConfig


class UniformConfig(Section):
    """Uniform in ``[-bound, bound]``; ``1 / sqrt(num_rows)`` of each table when ``bound`` is absent."""

    name: Literal["uniform"] = "uniform"
    bound: float | None = Field(default=None, gt=0)


class NormalConfig(Section):
    """Normal with mean 0."""

    name: Literal["normal"]
    std: float = Field(default=0.01, gt=0)


class ZerosConfig(Section):
    """All zeros."""

    name: Literal["zeros"]


InitializerConfig = Annotated[UniformConfig | NormalConfig | ZerosConfig, Field(discriminator="name")]


class EmbeddingConfig(Section):
    """The ``[embedding]`` table.

    Attributes:
        init: initial weights.
        optimizer: applied to each touched row; its ``weight_decay`` is the embedding regularisation.
        exchange: how a minibatch gets its rows.
    """

    init: InitializerConfig = NormalConfig(name="normal", std=0.01)
    optimizer: SparseOptimizerConfig = SparseAdamConfig(name="adam", lr=1e-3)
    exchange: Literal["local"] = "local"
