"""Networks side by side, and gates that mix what they give: parts of models of several tasks.

Shape legend: B samples, K inputs, M experts, E width of what an expert gives.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pibroch.config.model_zoo import ExpertsConfig
from pibroch.models.linear import Linear
from pibroch.models.mlp import MLP, HiddenOptions


class Experts(nn.Module):
    """M networks with one input.

    Args:
        count: M.
        width: K.
        config: hidden widths of an expert, the last of which is E.
    """

    def __init__(self, count: int, width: int, config: ExpertsConfig) -> None:
        super().__init__()
        options = HiddenOptions.of(config)
        self.networks = nn.ModuleList(
            MLP((width, *config.expert_hidden), options, last_is_hidden=True) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[B, K]`` to ``[B, M, E]``."""
        return torch.stack([network(x) for network in self.networks], 1)


class Gate(nn.Module):
    """``sum_i softmax(W x)_i f_i``, where ``f_i`` is what an expert gives.

    Args:
        width: K.
        count: M.
    """

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.linear = Linear(width, count, bias=False)

    def forward(self, x: Tensor, experts: Tensor) -> Tensor:
        """``[B, K]`` and ``[B, M, E]`` to ``[B, E]``."""
        shares = self.linear(x).softmax(1)
        return torch.bmm(shares[:, None], experts).squeeze(1)


class TaskHeads(nn.Module):
    """A network for each of T tasks.

    Args:
        num_tasks: T.
        config: hidden widths of each, in ``top``, and E.
    """

    def __init__(self, num_tasks: int, config: ExpertsConfig) -> None:
        super().__init__()
        widths = (config.expert_hidden[-1], *config.top, 1)
        options = HiddenOptions.of(config)
        self.networks = nn.ModuleList(MLP(widths, options) for _ in range(num_tasks))

    def forward(self, of_tasks: list[Tensor]) -> Tensor:
        """T times ``[B, E]`` to ``[B, T]``, or ``[B]`` of one task."""
        logits = [network(x) for network, x in zip(self.networks, of_tasks, strict=True)]
        return logits[0].squeeze(1) if len(logits) == 1 else torch.cat(logits, 1)
