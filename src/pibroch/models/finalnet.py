"""FinalNet: networks whose layers multiply half of their outputs with the other half.

Zhu et al., "FINAL: Factorized Interaction Layer for CTR Prediction", SIGIR 2023, and the authors'
code in the collection FuxiCTR. A factorized interaction layer of N = 2 is ``a = W_1 x + b_1``, ``b
= W_2 x + b_2``, then ``a + a * b`` (``sum``, as in the paper) or ``[a, a * b]`` of half as many
weights (``concat``, as in the code). The field gate gives ``[V, V * G]``, where G is a linear map
of the fields' vectors V over fields. The logit is that of one block behind the gate, or the mean of
it and of a second block without gate.

Differs from the paper: no activation on b, as in the code; blocks do not learn from one another's
mean (self-distillation), for a loss sees one logit.

Shape legend: B samples, F fields, D embedding width, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pibroch.config.model_zoo import FinalNetConfig
from pibroch.models.base import Model
from pibroch.models.fields import Fields
from pibroch.models.linear import Linear
from pibroch.models.mlp import MLP, HiddenOptions


class FactorizedInteraction(nn.Module):
    """A layer from ``[B, I]`` to ``[B, O]``; where O is odd, ``concat`` has a product less.

    Args:
        width_in: I.
        width_out: O.
        is_sum: ``a + a * b`` of twice as many weights in place of ``[a, a * b]``.
    """

    def __init__(self, width_in: int, width_out: int, is_sum: bool) -> None:
        super().__init__()
        self.num_products = width_out if is_sum else width_out // 2
        self.is_sum = is_sum
        self.linear = Linear(width_in, 2 * width_out if is_sum else width_out)

    def forward(self, x: Tensor, relu: bool = False) -> Tensor:
        """``[B, I]`` to ``[B, O]``, rectified when ``relu``."""
        both: Tensor = self.linear(x)
        first = both[:, : both.shape[1] - self.num_products]
        products = first[:, : self.num_products] * both[:, first.shape[1] :]
        out = first + products if self.is_sum else torch.cat([first, products], 1)
        return out.relu() if relu else out


class FieldGate(nn.Module):
    """``[V, V * (W V + b)]``; at the start both halves are the same."""

    def __init__(self, num_fields: int) -> None:
        super().__init__()
        self.gate = Linear(num_fields, num_fields)
        nn.init.zeros_(self.gate.weight)
        nn.init.ones_(self.gate.bias)

    def forward(self, vectors: Tensor) -> Tensor:
        """``[B, F, D]`` to ``[B, 2 F, D]``."""
        gates = self.gate(vectors.transpose(1, 2)).transpose(1, 2)
        return torch.cat([vectors, vectors * gates], 1)


class FinalNet(Model):
    """One or two blocks of factorized interaction layers."""

    section = FinalNetConfig

    def __init__(self, num_dense: int, num_features: int, config: FinalNetConfig) -> None:
        super().__init__(num_dense, num_features, config)
        self.fields = Fields(num_dense, num_features, config.dim)
        self.gate = FieldGate(self.fields.count) if config.field_gate else None
        width = self.fields.count * config.dim
        widths = [2 * width if config.field_gate else width, width][: config.blocks]
        options = HiddenOptions.of(config)
        self.blocks = nn.ModuleList(
            MLP(
                (width_in, *config.top, 1),
                options,
                hidden=lambda i, o, bias: FactorizedInteraction(i, o, config.residual == "sum"),
            )
            for width_in in widths
        )

    def logits(self, dense: Tensor, embeddings: Callable[[], Tensor]) -> Tensor:  # noqa: D102
        vectors = self.fields(dense, embeddings())
        inputs = [vectors if self.gate is None else self.gate(vectors), vectors]
        logits = [block(each.flatten(1)) for block, each in zip(self.blocks, inputs, strict=False)]
        return torch.cat(logits, 1).mean(1)
