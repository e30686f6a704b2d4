"""The embedding tables of a run: initial values, optimizer, exchange. Their width is the model's ``dim``."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

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


LOOKAHEAD_PLACEMENTS = ("row_wise", "table_wise")
PlacementKind = Literal["table_wise", "table_wise_pooled", "row_wise", "column_wise", "replicated"]


class EmbeddingConfig(Section):
    """The ``[embedding]`` table.

    Attributes:
        init: initial weights.
        optimizer: applied to each touched row; its ``weight_decay`` is the embedding regularisation.
        exchange: how a minibatch gets its rows; ``auto`` is ``local`` for one process and ``alltoall`` for several;
            ``lookahead`` reads batches ahead and keeps the rows that they need where they are needed next.
        placement: which rank holds what, see :mod:`pibroch.planner.plan`: a kind for all tables, or kinds by table (``""`` for
            those not named).
        plan: a file that says it instead.
        wire: the type in which rows and their gradients travel; ``float32`` is exact. With ``lookahead`` records that move for
            good are float32 always.
        compress: whether all of it travels compressed: the same numbers in a sixth fewer bytes, for some CPU.
        lookahead: batches that ``lookahead`` reads ahead; when absent as many as the cache holds, 200 at most.
        cache_rows: rows of other ranks that a rank can keep; when absent what fits into half of the free memory.
        cache: which design of the cache (BagPipe, Sec. 3.3); the other two are there to be compared with.
        delayed_sync: whether updates that the next step does not need cross beside it.
        servers: embedding servers that hold the rows in place of the ranks; started on this machine with the run, unless
            ``meet`` says where they are.
        oracle: who plans: every rank for itself (``replicated``), or one process for all (``central``), started as servers are.
        meet: ``tcp://host:port`` of servers and oracle that run already, see ``pibroch embedding-server --help``.
    """

    init: InitializerConfig = NormalConfig(name="normal", std=0.01)
    optimizer: SparseOptimizerConfig = SparseAdamConfig(name="adam", lr=1e-3)
    exchange: Literal["auto", "local", "alltoall", "lookahead"] = "auto"
    placement: PlacementKind | dict[str, PlacementKind] = "row_wise"
    plan: str | None = None
    wire: Literal["float32", "bfloat16", "float16"] = "float32"
    compress: bool = False
    lookahead: int | None = Field(default=None, ge=1)
    cache_rows: int | None = Field(default=None, ge=0)
    cache: Literal["lrpp", "partitioned", "replicated"] = "lrpp"
    delayed_sync: bool = True
    servers: int | None = Field(default=None, ge=1)
    oracle: Literal["replicated", "central"] = "replicated"
    meet: str | None = None

    @model_validator(mode="after")
    def _one_placement(self) -> Self:
        if self.plan is not None and self.placement != "row_wise":
            raise ValueError("takes `placement` or `plan`, not both")
        if self.meet is not None and self.servers is None and self.oracle == "replicated":
            raise ValueError(
                "takes `meet` with `servers`, the number of those that meet there, or `oracle = 'central'`"
            )
        return self

    @field_validator("lookahead", "cache_rows", "cache", "delayed_sync", "servers", "oracle")
    @classmethod
    def _only_with_lookahead(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        if value != cls.model_fields[info.field_name].default and info.data.get("exchange") != "lookahead":
            raise ValueError("nothing, or `embedding.exchange = 'lookahead'`, which alone reads ahead")
        return value

    @field_validator("placement")
    @classmethod
    def _whole_rows(cls, value: Any, info: ValidationInfo) -> Any:
        kinds = set(value.values()) if isinstance(value, dict) else {value}
        if info.data.get("exchange") == "lookahead" and not kinds.issubset(LOOKAHEAD_PLACEMENTS):
            raise ValueError(f"{' or '.join(LOOKAHEAD_PLACEMENTS)} with `embedding.exchange = 'lookahead'`")
        return value
