"""Optimizers of both kinds (dense layers, embedding rows) and the schedule over both.

Each optimizer is its own section, chosen by ``name``, so that a setting of another optimizer is an
unknown key and not a silently ignored one.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from pibroch.config.base import Section
from pibroch.config.registry import Choice, Registry, Spec

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1)]

SPARSE_OPTIMIZERS = Registry(
    "sparse optimizer",
    "pibroch.sparse_optimizers",
    Spec,
    "pibroch.embedding:SparseOptimizer",
    ["pibroch.config.optimizer:SPARSE_SPECS"],
)
DENSE_OPTIMIZERS = Registry(
    "optimizer",
    "pibroch.optimizers",
    Spec,
    "torch.optim:Optimizer",
    ["pibroch.config.optimizer:DENSE_SPECS"],
)


class SparseOptimizerConfig(Choice):
    """Settings of an optimizer of embedding rows; each adds its own.

    Its class takes them by name.

    Attributes:
        lr: learning rate.
        weight_decay: see :class:`pibroch.embedding.SparseOptimizer`, here and below.
        max_row_norm: bounds the norm of a row's gradient.
    """

    registry: ClassVar[Registry[Spec]] = SPARSE_OPTIMIZERS

    lr: Positive
    weight_decay: NonNegative = 0.0
    max_row_norm: Positive | None = None

    def options(self) -> dict[str, Any]:
        """What the optimizer is made from, beside ``average``."""
        return self.model_dump(exclude={"name"})


class SparseSGDConfig(SparseOptimizerConfig):
    """Gradient descent on embedding rows."""

    name: Literal["sgd"] = "sgd"


class SparseAdagradConfig(SparseOptimizerConfig):
    """Adagrad on embedding rows."""

    name: Literal["adagrad"] = "adagrad"
    eps: Positive = 1e-10
    initial_accumulator: NonNegative = 0.0


class RowWiseAdagradConfig(SparseOptimizerConfig):
    """Adagrad with one accumulator a row."""

    name: Literal["rowwise_adagrad"] = "rowwise_adagrad"
    eps: Positive = 1e-10
    initial_accumulator: NonNegative = 0.0


class SparseAdamConfig(SparseOptimizerConfig):
    """Adam on embedding rows; moments decay only when the row is touched."""

    name: Literal["adam"] = "adam"
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Positive = 1e-8


class RowWiseAdamConfig(SparseOptimizerConfig):
    """Adam with one second moment a row."""

    name: Literal["rowwise_adam"] = "rowwise_adam"
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Positive = 1e-8


SPARSE_SPECS = (
    Spec("sgd", "gradient descent", SparseSGDConfig, "pibroch.embedding:SGD"),
    Spec("adagrad", "one accumulator an element", SparseAdagradConfig, "pibroch.embedding:Adagrad"),
    Spec(
        "rowwise_adagrad",
        "one accumulator a row",
        RowWiseAdagradConfig,
        "pibroch.embedding:RowWiseAdagrad",
    ),
    Spec("adam", "two moments an element", SparseAdamConfig, "pibroch.embedding:Adam"),
    Spec(
        "rowwise_adam",
        "the second moment once a row",
        RowWiseAdamConfig,
        "pibroch.embedding:RowWiseAdam",
    ),
)


class DenseOptimizerConfig(Choice):
    """Settings of an optimizer of dense layers; each adds its own.

    Its class takes the parameters, then these by name.

    Attributes:
        lr: learning rate.
        weight_decay: L2 added to the gradient, unless the optimizer decouples it.
    """

    registry: ClassVar[Registry[Spec]] = DENSE_OPTIMIZERS

    lr: Positive
    weight_decay: NonNegative = 0.0

    def options(self) -> dict[str, Any]:
        """What the optimizer is made from, beside the parameters."""
        return self.model_dump(exclude={"name"})


class SGDConfig(DenseOptimizerConfig):
    """Gradient descent on dense layers."""

    name: Literal["sgd"] = "sgd"
    momentum: Beta = 0.0


class AdagradConfig(DenseOptimizerConfig):
    """Adagrad on dense layers."""

    name: Literal["adagrad"] = "adagrad"
    eps: Positive = 1e-10
    initial_accumulator: NonNegative = 0.0

    def options(self) -> dict[str, Any]:
        """See :class:`DenseOptimizerConfig`; by torch's names."""
        own = self.model_dump(exclude={"name", "initial_accumulator"})
        return own | {"initial_accumulator_value": self.initial_accumulator}


class AdamConfig(DenseOptimizerConfig):
    """Adam on dense layers."""

    name: Literal["adam"] = "adam"
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Positive = 1e-8


class AdamWConfig(DenseOptimizerConfig):
    """Adam on dense layers with decoupled ``weight_decay``."""

    name: Literal["adamw"] = "adamw"
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Positive = 1e-8


DENSE_SPECS = (
    Spec("sgd", "gradient descent", SGDConfig, "torch.optim:SGD"),
    Spec("adagrad", "one accumulator an element", AdagradConfig, "torch.optim:Adagrad"),
    Spec("adam", "two moments an element", AdamConfig, "torch.optim:Adam"),
    Spec("adamw", "Adam with decoupled decay", AdamWConfig, "torch.optim:AdamW"),
)


class ScheduleConfig(Section):
    """A factor on both learning rates as a function of the step.

    Attributes:
        name: the shape after warm-up.
        warmup_steps: the factor rises linearly from 0 to 1 over these steps.
        decay_steps: cosine and linear reach ``final_factor`` that many steps after warm-up; the
            whole run when absent.
        final_factor: where cosine and linear end.
        step_every, step_factor: ``step`` multiplies by ``step_factor`` every ``step_every`` steps.
        plateau_factor: multiply by this after an evaluation that brought no improvement; 1 switches
            it off.
    """

    name: Literal["constant", "cosine", "linear", "step"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    decay_steps: int | None = Field(default=None, ge=1)
    final_factor: float = Field(default=0.0, ge=0, le=1)
    step_every: int | None = Field(default=None, ge=1)
    step_factor: float = Field(default=0.1, gt=0, le=1)
    plateau_factor: float = Field(default=1.0, gt=0, le=1)

    @model_validator(mode="after")
    def _step_needs_its_interval(self) -> Self:
        if self.name == "step" and self.step_every is None:
            raise ValueError("`step` needs `step_every`, the number of steps between two drops")
        return self
