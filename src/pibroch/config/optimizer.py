"""Optimizers of both kinds (dense layers, embedding rows) and the learning-rate schedule over both.

Each optimizer is its own section, chosen by ``name``, so that a setting of another optimizer is an
unknown key and not a silently ignored one.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pibroch.config.base import Section

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class _Optimizer(Section):
    lr: Positive
    weight_decay: NonNegative = 0.0


class _Adagrad(_Optimizer):
    eps: Positive = 1e-10
    initial_accumulator: NonNegative = 0.0


class _Adam(_Optimizer):
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Positive = 1e-8


class SparseSGDConfig(_Optimizer):
    """Gradient descent on embedding rows; ``max_row_norm`` bounds a row's gradient, here and below."""

    name: Literal["sgd"]
    max_row_norm: Positive | None = None


class SparseAdagradConfig(_Adagrad):
    """Adagrad on embedding rows."""

    name: Literal["adagrad"]
    max_row_norm: Positive | None = None


class RowWiseAdagradConfig(_Adagrad):
    """Adagrad with one accumulator a row."""

    name: Literal["rowwise_adagrad"]
    max_row_norm: Positive | None = None


class SparseAdamConfig(_Adam):
    """Adam on embedding rows; moments decay only when the row is touched."""

    name: Literal["adam"]
    max_row_norm: Positive | None = None


class RowWiseAdamConfig(_Adam):
    """Adam with one second moment a row."""

    name: Literal["rowwise_adam"]
    max_row_norm: Positive | None = None


class SGDConfig(_Optimizer):
    """Gradient descent on dense layers."""

    name: Literal["sgd"]
    momentum: Beta = 0.0


class AdagradConfig(_Adagrad):
    """Adagrad on dense layers."""

    name: Literal["adagrad"]


class AdamConfig(_Adam):
    """Adam on dense layers; ``weight_decay`` is L2 added to the gradient."""

    name: Literal["adam"]


class AdamWConfig(_Adam):
    """Adam on dense layers with decoupled ``weight_decay``."""

    name: Literal["adamw"]


SparseOptimizerConfig = Annotated[
    SparseSGDConfig
    | SparseAdagradConfig
    | RowWiseAdagradConfig
    | SparseAdamConfig
    | RowWiseAdamConfig,
    Field(discriminator="name"),
]
DenseOptimizerConfig = Annotated[
    SGDConfig | AdagradConfig | AdamConfig | AdamWConfig, Field(discriminator="name")
]


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
