"""The rows' learning rates as torch's schedulers know them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from pibroch.embedding import TableGroup


class FusedOptimizer(torch.optim.Optimizer):
    """The learning rates of rows; stepping does nothing, as rows are updated inside backward.

    ``param_groups`` has one entry for each group of tables with one dim and one optimizer, with the
    names of its ``tables``. Rates that are written there, by torch's schedulers or by hand, hold
    from the next backward pass on.
    """

    def __init__(self, groups: Sequence[TableGroup]) -> None:
        named = [
            {
                "params": [nn.Parameter(torch.zeros(()), requires_grad=False)],
                "lr": each.optimizer.lr,
                "tables": [table.name for table in each.space.tables],
            }
            for each in groups
        ]
        super().__init__(named, {})

    @property
    def learning_rates(self) -> list[float]:
        """Of each group; a schedule may have made a tensor of one."""
        return [float(group["lr"]) for group in self.param_groups]

    def set_gradients(self, number: float) -> None:
        """Give each group's parameter, which stands for rows, a gradient that scalers can check."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.full_like(parameter, number)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Run the closure, if there is one: its backward pass updates the rows."""
        return None if closure is None else closure()
