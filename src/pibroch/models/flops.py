"""Floating-point operations of a model, counted from its modules as it runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pibroch.models.base import Model


def training_flops(model: Model, of: nn.Module | None = None) -> int:
    """Operations a sample of a step's forward and backward pass.

    Only matrix products count, an addition and a product each.

    Args:
        model: which runs.
        of: the part of it that counts; all of it when absent.

    A layer takes three products, or two where nobody wants the gradient of its input, as with dense
    features; the dot interaction is one product of all its vectors with all of them.
    """
    products: list[int] = []

    def count(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        wanted = inputs[0].requires_grad
        assert isinstance(module, nn.Linear)
        products.append((3 if wanted else 2) * output.numel() * module.in_features // num_samples)

    num_samples = 2
    hooks = [
        module.register_forward_hook(count)
        for module in (model if of is None else of).modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        embedded = torch.zeros(
            num_samples, model.num_features, model.table_dim(model.config.dim), requires_grad=True
        )
        with torch.enable_grad():
            model(torch.zeros(num_samples, model.num_dense), embedded)
    finally:
        for hook in hooks:
            hook.remove()
    outside_layers = 0 if of is not None else 3 * model.interaction_products
    return 2 * (sum(products) + outside_layers)
