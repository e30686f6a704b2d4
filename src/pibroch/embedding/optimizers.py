"""Sparse optimizers: what they keep in a row's record, and the kernel that applies them.

Formulas stand beside their kernels (:mod:`pibroch.kernels.scatter_update`). Only rows that a batch
touches move, decay or age; Adam's bias correction counts global steps, as
``torch.optim.SparseAdam`` does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pibroch.embedding.dtype import Dtype, weight_floats
from pibroch.errors import ConfigError
from pibroch.kernels import scatter_update as kernels
from pibroch.kernels.scatter_update import Hyper


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseOptimizer(ABC):
    """Base of the sparse optimizers.

    Attributes:
        lr: learning rate; schedules change it between steps through ``Embeddings.learning_rate``.
        weight_decay: L2, added to the gradient of touched rows ("embedding regularisation").
        decoupled: whether ``weight_decay`` shrinks touched rows by ``lr * weight_decay`` instead
            (Loshchilov and Hutter 2019).
        max_row_norm: a row's combined gradient is clipped to this norm; ``None`` for never.
        max_element: each element of it is clipped to plus or minus this, before its norm; ``None``
            for never.
        average: decay of a moving average of the weights that records keep beside the weights, for
            evaluation and serving (``Embeddings.averaged``); ``None`` for none. Costs D + 1 floats
            a row; steps are counted to 2**24.
    """

    lr: float
    weight_decay: float = 0.0
    max_row_norm: float | None = None
    average: float | None = None
    decoupled: bool = False
    max_element: float | None = None

    kernel: ClassVar[Callable[..., Any]]
    narrow_kernel: ClassVar[Callable[..., Any] | None] = None
    """Of records with bfloat16 weights, if there may be any."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, int | float) and not 0 <= value < float("inf"):
                raise ConfigError(
                    f"{type(self).__name__} with {name} {value}", "a finite number of at least 0"
                )
        if self.average is not None and self.average >= 1:
            raise ConfigError(
                f"{type(self).__name__} with average {self.average}",
                "a decay from 0 to below 1, or None",
            )
        for name in ("max_row_norm", "max_element"):
            if getattr(self, name) == 0:
                raise ConfigError(
                    f"{type(self).__name__} with {name} 0",
                    "a positive bound, or None for no clipping",
                )

    @abstractmethod
    def moments(self, dim: int) -> dict[str, int]:
        """Floats of each of the optimizer's own fields in a record, in their order."""

    def state_fields(self, dim: int) -> dict[str, int]:
        """Floats that each state field takes in a record.

        The moments, then the moving average and its step.
        """
        return self.moments(dim) | (
            {"average": dim, "averaged_at": 1} if self.average is not None else {}
        )

    def hyper(self, learning_rate: float, step: int) -> Hyper:
        """What the kernel needs in update number ``step`` (from 1)."""
        decay, shrink = (
            (0.0, 1.0 - learning_rate * self.weight_decay)
            if self.decoupled
            else (self.weight_decay, 1.0)
        )
        clip = self.max_row_norm or 0.0
        clip_element = self.max_element or 0.0
        return Hyper(learning_rate, decay, clip, max_element=clip_element, shrink=shrink)

    def initial_state(self) -> float:
        """The value with which all moments start."""
        return 0.0

    def record_width(self, dim: int, dtype: Dtype = "float32") -> int:
        """Floats in a record: weights, two of 16 bits in one float, then state."""
        return weight_floats(dim, dtype) + sum(self.state_fields(dim).values())


def _check_eps(optimizer: SparseOptimizer, eps: float) -> None:
    if np.float32(eps) == 0:
        raise ConfigError(
            f"{type(optimizer).__name__} with eps {eps}, where moments may be 0",
            "a positive float32: a gradient of 0 would be divided by 0",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SGD(SparseOptimizer):
    """Stochastic gradient descent."""

    kernel: ClassVar[Callable[..., Any]] = staticmethod(kernels.sgd)
    narrow_kernel: ClassVar[Callable[..., Any] | None] = staticmethod(kernels.narrow_sgd)

    def moments(self, dim: int) -> dict[str, int]:
        """See :class:`SparseOptimizer`."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen(SparseOptimizer):
    """No row moves, no state is kept, and no gradient travels where exchanges can spare it."""

    lr: float = 0.0

    kernel: ClassVar[Callable[..., Any]] = staticmethod(kernels.frozen)

    def moments(self, dim: int) -> dict[str, int]:
        """See :class:`SparseOptimizer`."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Adagrad(SparseOptimizer):
    """Adagrad with one accumulator an element."""

    eps: float = 1e-10
    initial_accumulator: float = 0.0

    kernel: ClassVar[Callable[..., Any]] = staticmethod(kernels.adagrad)
    narrow_kernel: ClassVar[Callable[..., Any] | None] = staticmethod(kernels.narrow_adagrad)

    def __post_init__(self) -> None:
        super(Adagrad, self).__post_init__()
        if self.initial_accumulator == 0:
            _check_eps(self, self.eps)

    def moments(self, dim: int) -> dict[str, int]:
        """See :class:`SparseOptimizer`."""
        return {"sum": dim}

    def initial_state(self) -> float:
        """See :class:`SparseOptimizer`."""
        return self.initial_accumulator

    def hyper(self, learning_rate: float, step: int) -> Hyper:
        """See :class:`SparseOptimizer`."""
        return super(Adagrad, self).hyper(learning_rate, step)._replace(eps=self.eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWiseAdagrad(Adagrad):
    """Adagrad with one accumulator a row."""

    kernel: ClassVar[Callable[..., Any]] = staticmethod(kernels.row_wise_adagrad)
    narrow_kernel: ClassVar[Callable[..., Any] | None] = staticmethod(
        kernels.narrow_row_wise_adagrad
    )

    def moments(self, dim: int) -> dict[str, int]:
        """See :class:`SparseOptimizer`."""
        return {"sum": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam(SparseOptimizer):
    """Adam on touched rows."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    kernel: ClassVar[Callable[..., Any]] = staticmethod(kernels.adam)
    narrow_kernel: ClassVar[Callable[..., Any] | None] = staticmethod(kernels.narrow_adam)

    def __post_init__(self) -> None:
        super(Adam, self).__post_init__()
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(
                f"{type(self).__name__} with betas {self.betas}", "two numbers from 0 to below 1"
            )
        _check_eps(self, self.eps)

    def moments(self, dim: int) -> dict[str, int]:
        """See :class:`SparseOptimizer`."""
        return {"exp_avg": dim, "exp_avg_sq": dim}

    def hyper(self, learning_rate: float, step: int) -> Hyper:
        """See :class:`SparseOptimizer`."""
        beta1, beta2 = self.betas
        return (
            super(Adam, self)
            .hyper(learning_rate, step)
            ._replace(
                eps=self.eps,
                beta1=beta1,
                beta2=beta2,
                correction1=1 - beta1**step,
                correction2=1 - beta2**step,
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWiseAdam(Adam):
    """Adam with one second moment a row."""

    kernel: ClassVar[Callable[..., Any]] = staticmethod(kernels.row_wise_adam)
    narrow_kernel: ClassVar[Callable[..., Any] | None] = staticmethod(kernels.narrow_row_wise_adam)

    def moments(self, dim: int) -> dict[str, int]:
        """See :class:`SparseOptimizer`."""
        return {"exp_avg": dim, "exp_avg_sq": 1}
