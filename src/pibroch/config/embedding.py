"""The embedding tables of a run: initial values, optimizer, exchange. Their width is the model's ``dim``."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

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


PlacementKind = Literal["table_wise", "table_wise_pooled", "row_wise", "column_wise", "replicated"]


class EmbeddingConfig(Section):
    """The ``[embedding]`` table.

    Attributes:
        init: initial weights.
        optimizer: applied to each touched row; its ``weight_decay`` is the embedding regularisation.
        exchange: how a minibatch gets its rows; ``auto`` is ``local`` for one process and ``alltoall`` for several.
        placement: which rank holds what, see :mod:`pibroch.planner.plan`: a kind for all tables, or kinds by table (``""`` for
            those not named).
        plan: a file that says it instead.
        wire: the type in which rows and their gradients travel; ``float32`` is exact.
    """

    init: InitializerConfig = NormalConfig(name="normal", std=0.01)
    optimizer: SparseOptimizerConfig = SparseAdamConfig(name="adam", lr=1e-3)
    exchange: Literal["auto", "local", "alltoall"] = "auto"
    placement: PlacementKind | dict[str, PlacementKind] = "row_wise"
    plan: str | None = None
    wire: Literal["float32", "bfloat16", "float16"] = "float32"

    @model_validator(mode="after")
    def _one_placement(self) -> Self:
        if self.plan is not None and self.placement != "row_wise":
            raise ValueError("takes `placement` or `plan`, not both")
        return self
