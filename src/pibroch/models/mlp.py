"""Stacks of linear layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn

from pibroch.config.model import Activation, ModelConfig

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}


@dataclass(frozen=True, slots=True)
class HiddenOptions:
    """What stands between two linear layers."""

    activation: Activation = "relu"
    dropout: float = 0.0
    batch_norm: bool = False

    @classmethod
    def of(cls, config: ModelConfig) -> HiddenOptions:
        """The options for a model's top or deep network."""
        return cls(config.activation, config.dropout, config.batch_norm)


class MLP(nn.Module):
    """Linear layers ``widths[0] -> widths[1] -> ...``, each but the last followed by norm, activation, dropout.

    Args:
        widths: of the input and of each layer's output, at least two.
        options: what follows a hidden layer.
        last_is_hidden: treat the last layer as a hidden one too.
    """

    def __init__(
        self, widths: Sequence[int], options: HiddenOptions = HiddenOptions(), last_is_hidden: bool = False
    ) -> None:
        super().__init__()
        self.layers = nn.Sequential()
        for i, (width_in, width_out) in enumerate(pairwise(widths)):
            self.layers.append(nn.Linear(width_in, width_out))
            if last_is_hidden or i < len(widths) - 2:
                self._append_hidden(width_out, options)

    def _append_hidden(self, width: int, options: HiddenOptions) -> None:
        if options.batch_norm:
            self.layers.append(nn.BatchNorm1d(width))
        self.layers.append(ACTIVATIONS[options.activation]())
        if options.dropout:
            self.layers.append(nn.Dropout(options.dropout))

    def forward(self, x: Tensor) -> Tensor:
        """``[B, widths[0]]`` to ``[B, widths[-1]]``."""
        out: Tensor = self.layers(x)
        return out


def initialise_xavier_normal(module: nn.Module) -> None:
    """Weights from N(0, 2 / (in + out)), biases from N(0, 1 / out), as the reference DLRM starts."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_normal_(layer.weight)
            nn.init.normal_(layer.bias, std=math.sqrt(1 / layer.out_features))


def initialise_xavier_uniform(module: nn.Module) -> None:
    """Glorot's uniform weights and zero biases, as the reference DCNv2 and DeepFM start."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
