"""An optimizer of dense layers of one's own, in one file: steps of the gradient's sign."""

import torch

from pibroch.config.optimizer import DenseOptimizerConfig


class SignConfig(DenseOptimizerConfig):
    shrink: float = 1.0


class SignDescent(torch.optim.Optimizer):
    section = SignConfig

    def __init__(self, parameters, lr, weight_decay, shrink):
        super().__init__(parameters, {"lr": lr, "shrink": shrink})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * group["shrink"] * parameter.grad.sign()
