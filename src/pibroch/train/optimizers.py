"""From optimizer sections of a recipe to optimizers of dense layers and of embedding rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from pibroch.config.optimizer import DenseOptimizerConfig, SparseOptimizerConfig
from pibroch.embedding import SGD, Adagrad, Adam, RowWiseAdagrad, RowWiseAdam, SparseOptimizer

SPARSE_OPTIMIZERS: dict[str, type[SparseOptimizer]] = {
    "sgd": SGD,
    "adagrad": Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
    "adam": Adam,
    "rowwise_adam": RowWiseAdam,
}
_DENSE_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
_TORCH_NAMES = {"initial_accumulator": "initial_accumulator_value"}


def build_sparse_optimizer(
    config: SparseOptimizerConfig, average: float | None = None
) -> SparseOptimizer:
    """The optimizer of embedding rows.

    ``average`` is the decay of the rows' moving averages, if they are wanted.
    """
    return SPARSE_OPTIMIZERS[config.name](**config.model_dump(exclude={"name"}), average=average)


def build_dense_optimizer(
    config: DenseOptimizerConfig, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """The torch optimizer of dense layers."""
    settings: dict[str, Any] = config.model_dump(exclude={"name"})
    return _DENSE_OPTIMIZERS[config.name](
        parameters, **{_TORCH_NAMES.get(key, key): value for key, value in settings.items()}
    )
