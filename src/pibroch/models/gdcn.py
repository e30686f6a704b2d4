"""GDCN: crosses with a gate that says how much of each product comes through.

Wang et al., "Towards Deeper, Lighter and Interpretable Cross Network for CTR Prediction", CIKM
2023, Eq. 1: ``c_{l+1} = c_0 * (W_l c_l + b_l) * sigmoid(G_l c_l) + c_l``. GDCN-S is the structure
``stacked``, GDCN-P ``parallel``.

Differs from the paper: dense features enter as they are, as in DCNv2; ``W_l`` and ``G_l`` may have
a rank.

Shape legend: B samples, K inputs, R rank.
"""

from __future__ import annotations

from torch import Tensor, nn

from pibroch.config.model_zoo import GDCNConfig
from pibroch.models.dcnv2 import CrossNet, DCNv2
from pibroch.models.linear import Linear


class GatedCrossNet(CrossNet):
    """``x_{l+1} = x_0 * (W_l x_l + b_l) * sigmoid(G_l x_l) + x_l``; arguments of ``CrossNet``."""

    def __init__(self, width: int, num_layers: int, rank: int | None = None) -> None:
        super().__init__(width, num_layers, rank)
        self.gate_reduce = nn.ModuleList()
        if rank is not None:
            self.gate_reduce.extend(Linear(width, rank, bias=False) for _ in range(num_layers))
        self.gate = nn.ModuleList(
            Linear(rank or width, width, bias=False) for _ in range(num_layers)
        )

    def factor(self, i: int, x: Tensor) -> Tensor:
        """See :class:`CrossNet`."""
        gate: Tensor = self.gate[i](self.gate_reduce[i](x) if self.gate_reduce else x)
        return super().factor(i, x) * gate.sigmoid()


class GDCN(DCNv2):
    """Gated crosses and a deep network, on or beside them."""

    section = GDCNConfig
    crosses = GatedCrossNet
