"""What the callee of topic ``rpc`` runs for its caller, whichever way the call takes.

Torch alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

LAYER_WIDTH = 1000


def identity(tensor: Tensor) -> Tensor:
    """The argument itself."""
    return tensor


def plus_one(tensor: Tensor) -> Tensor:
    """A new tensor of the same size, as functions return one as a rule."""
    return tensor + 1


def ops(tensor: Tensor) -> Tensor:
    """The paper's other function: 200 pointwise operations.

    All but the first in place, as it is not malloc that is timed.
    """
    result = tensor * 1.001
    result.add_(0.5)
    for _ in range(99):
        result.mul_(0.999).add_(0.25)
    return result


def send(tensor: Tensor) -> Tensor:
    """Takes a tensor, returns next to nothing: the way there alone."""
    return tensor[:1].clone()


def fetch(reference: Any) -> Tensor:
    """The value of a remote reference that the caller holds."""
    value: Tensor = reference.to_here()
    return value


def gradients_of(layer: Any, autograd: str, context_id: int) -> list[Tensor]:
    """Gradients of a layer that lives here, in one context of distributed autograd."""
    import importlib

    gradients = importlib.import_module(autograd).get_gradients(context_id)
    return [gradients[parameter] for parameter in layer.local_value().parameters()]


def first_weights() -> tuple[Tensor, Tensor]:
    """Starting weight and bias of a layer, the same everywhere."""
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(LAYER_WIDTH, LAYER_WIDTH, generator=generator) / LAYER_WIDTH**0.5
    return weight, torch.zeros(LAYER_WIDTH)


class Layer(nn.Module):
    """One linear layer whose input may be a remote reference, as in the paper's Listing 1."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(LAYER_WIDTH, LAYER_WIDTH)
        weight, bias = first_weights()
        self.linear.load_state_dict({"weight": weight, "bias": bias})

    def forward(self, reference: Any) -> Tensor:
        """The layer of the reference's value."""
        return self.local(reference.to_here())

    def local(self, value_BD: Tensor) -> Tensor:
        """The layer of a tensor."""
        result: Tensor = self.linear(value_BD)
        return result
