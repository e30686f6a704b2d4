"""Attention over padded sequences.

A mask says which positions hold an item; what others hold has no weight.

Shape legend: B samples, T positions, D width of an item, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pibroch.errors import ConfigError
from pibroch.models.dropout import Dropout
from pibroch.models.layer_norm import LayerNorm
from pibroch.models.linear import Linear
from pibroch.models.mlp import MLP, HiddenOptions


def masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Weights along the last dim, 0 where ``mask`` is false, all 0 where it is false throughout.

    >>> masked_softmax(torch.zeros(1, 3), torch.tensor([[True, False, True]]))
    tensor([[0.5000, 0.0000, 0.5000]])
    """
    lowest = torch.finfo(scores.dtype).min
    return scores.masked_fill(~mask, lowest).softmax(-1) * mask


class TargetAttention(nn.Module):
    """DIN's local activation unit: ``sum_t a_t h_t``, ``a_t = MLP([q, h_t, q - h_t, q * h_t])``.

    It begins near the plain sum, with weights around 1, so that items learn from the first step on.

    Args:
        dim: D.
        hidden: widths of the network's hidden layers.
        options: what follows a hidden layer.
        softmax: whether ``a`` goes through a softmax.
    """

    def __init__(
        self, dim: int, hidden: Sequence[int], options: HiddenOptions, softmax: bool
    ) -> None:
        super().__init__()
        self.unit = MLP((4 * dim, *hidden, 1), options)
        last = self.unit.layers[-1]
        assert isinstance(last, Linear)
        nn.init.ones_(last.bias)
        self.softmax = softmax

    def forward(self, items: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        """``[B, T, D]``, ``[B, T]`` and q ``[B, D]`` to ``[B, D]``."""
        q = target[:, None].expand_as(items)
        pairs = torch.cat([q, items, q - items, q * items], 2)
        scores = self.unit(pairs.flatten(0, 1)).view(mask.shape)
        weights = masked_softmax(scores, mask) if self.softmax else scores * mask
        return (weights[:, None].to(items.dtype) @ items).squeeze(1)


class SelfAttention(nn.Module):
    """Multi-head scaled dot-product attention (Vaswani et al. 2017) of a sequence to itself.

    Args:
        dim: D.
        heads: H, which divides it.
        dropout: of weights.

    Raises:
        ConfigError: when it does not.
    """

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        if dim % heads:
            raise ConfigError(
                f"{heads} heads for embeddings of width {dim}",
                "heads that divide it",
                "set model.attention_heads to 1, or change model.dim",
            )
        self.heads = heads
        self.project = Linear(dim, 3 * dim)
        self.join = Linear(dim, dim)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """``[B, T, D]`` to the same, by a mask ``[B, T, T]`` or, for all alike, ``[B, 1, T]``.

        Position t reads s where ``mask[b, t, s]``.
        """
        size, length, dim = x.shape
        shape = size, length, 3, self.heads, dim // self.heads
        projected = self.project(x.flatten(0, 1)).view(shape)
        queries, keys, values = projected.permute(2, 0, 3, 1, 4)
        scores = queries @ keys.transpose(2, 3) * (dim // self.heads) ** -0.5
        weights = self.dropout(masked_softmax(scores, mask[:, None]))
        heads_BTHD = (weights.to(values.dtype) @ values).transpose(1, 2)
        out: Tensor = self.join(heads_BTHD.reshape(-1, dim))
        return out.view(x.shape)


class TransformerBlock(nn.Module):
    """Self-attention and a network of two layers, each with a residual connection.

    ``LN(x + f(x))`` of both, or with ``norm_first`` ``x + f(LN(x))``.

    Args:
        dim: D.
        heads: H.
        dropout: of attention's weights and behind each f.
        norm_first: where the norms are.
    """

    def __init__(self, dim: int, heads: int, dropout: float, norm_first: bool) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.attention = SelfAttention(dim, heads, dropout)
        self.network = MLP((dim, dim, dim))
        self.norms = nn.ModuleList(LayerNorm(dim) for _ in range(2))
        self.dropouts = nn.ModuleList(Dropout(dropout) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """``[B, T, D]`` to the same; the mask as for :class:`SelfAttention`."""
        x = self._joined(0, x, self.attention(self._normed(0, x), mask))
        of_network = self.network(self._normed(1, x).flatten(0, 1)).view(x.shape)
        return self._joined(1, x, of_network)

    def _normed(self, number: int, x: Tensor) -> Tensor:
        return self.norms[number](x) if self.norm_first else x

    def _joined(self, number: int, x: Tensor, change: Tensor) -> Tensor:
        out: Tensor = x + self.dropouts[number](change)
        return out if self.norm_first else self.norms[number](out)
