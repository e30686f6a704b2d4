"""From optimizer sections of a recipe to optimizers of dense layers and of embedding rows."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from pibroch.config.optimizer import (
    DENSE_OPTIMIZERS,
    SPARSE_OPTIMIZERS,
    DenseOptimizerConfig,
    SparseOptimizerConfig,
)
from pibroch.embedding import SparseOptimizer


def build_sparse_optimizer(
    config: SparseOptimizerConfig, average: float | None = None
) -> SparseOptimizer:
    """The optimizer of embedding rows.

    ``average`` is the decay of the rows' moving averages, if they are wanted.
    """
    options = config.options() | {"average": average}
    optimizer: SparseOptimizer = SPARSE_OPTIMIZERS.find(config.name).build(**options)
    return optimizer


def build_dense_optimizer(
    config: DenseOptimizerConfig, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """The torch optimizer of dense layers."""
    spec = DENSE_OPTIMIZERS.find(config.name)
    optimizer: torch.optim.Optimizer = spec.build(parameters, **config.options())
    return optimizer
