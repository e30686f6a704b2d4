"""From sections of a recipe to optimizers of dense layers and of rows, and their learning rates.

The rate is a pure function of the step: a resumed run needs no state for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from pibroch.config.optimizer import (
    DENSE_OPTIMIZERS,
    SPARSE_OPTIMIZERS,
    DenseOptimizerConfig,
    ScheduleConfig,
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


def learning_rate_factor(config: ScheduleConfig, step: int, total_steps: int | None) -> float:
    """The factor on all learning rates in step ``step`` (from 1).

    Of a run without an end there is no ``total_steps``, and ``decay_steps`` are given.

    >>> config = ScheduleConfig(name="linear", warmup_steps=2, final_factor=0.5)
    >>> [learning_rate_factor(config, step, total_steps=6) for step in range(1, 7)]
    [0.5, 1.0, 0.875, 0.75, 0.625, 0.5]
    """
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    after_warmup = step - config.warmup_steps
    if config.name == "step":
        return config.step_factor ** (after_warmup // (config.step_every or 1))
    if config.name == "constant":
        return 1.0
    decay_steps = config.decay_steps or max(1, (total_steps or 0) - config.warmup_steps)
    done = min(1.0, after_warmup / decay_steps)
    remaining = (1 + math.cos(math.pi * done)) / 2 if config.name == "cosine" else 1 - done
    return config.final_factor + (1 - config.final_factor) * remaining
