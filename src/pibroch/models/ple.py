"""PLE: several tasks with experts of their own and shared ones, in levels.

Tang et al., "Progressive Layered Extraction (PLE): A Novel Multi-Task Learning Model for
Personalized Recommendations", RecSys 2020. In a level task k mixes its own experts and the shared
ones, ``g^k(x) = softmax(W^k x) S^k(x)`` (customised gate control, Eq. 1 to 3), and a shared gate
mixes all experts. In the next level these stand in the place of x: ``g^{k,j}(x) = w^{k,j}(g^{k,j-1}
(x)) S^{k,j}(x)`` (Eq. 5), experts of task k and its gate reading ``g^{k,j-1}``, the shared ones
``g^{s,j-1}``. The last level has no shared gate; on what a task has there is its own network.

Shape legend: B samples, K inputs, E width of what an expert gives, T tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from pibroch.config.model_zoo import PLEConfig
from pibroch.models.base import MultiTaskModel
from pibroch.models.experts import Experts, Gate, TaskHeads


class ExtractionLevel(nn.Module):
    """Experts and gates of a level.

    Args:
        width: K.
        num_tasks: T.
        config: numbers and widths of the experts.
        is_last: whether the shared gate is left out.
    """

    def __init__(self, width: int, num_tasks: int, config: PLEConfig, is_last: bool) -> None:
        super().__init__()
        own = config.task_experts
        shared = config.shared_experts
        self.own = nn.ModuleList(Experts(own, width, config) for _ in range(num_tasks))
        self.shared = Experts(shared, width, config)
        self.gates = nn.ModuleList(Gate(width, own + shared) for _ in range(num_tasks))
        self.shared_gate = None if is_last else Gate(width, num_tasks * own + shared)

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """What tasks and, last, the shared gate have: ``[B, K]`` each to ``[B, E]`` each."""
        own = [experts(x) for experts, x in zip(self.own, inputs[:-1], strict=True)]
        shared = self.shared(inputs[-1])
        out = [
            gate(x, torch.cat([experts, shared], 1))
            for gate, x, experts in zip(self.gates, inputs[:-1], own, strict=True)
        ]
        if self.shared_gate is not None:
            out.append(self.shared_gate(inputs[-1], torch.cat([*own, shared], 1)))
        return out


class PLE(MultiTaskModel):
    """Levels of experts, and a network for each task."""

    section = PLEConfig

    def __init__(
        self, num_dense: int, num_features: int, config: PLEConfig, num_tasks: int = 1
    ) -> None:
        super().__init__(num_dense, num_features, config, num_tasks)
        width = num_features * config.dim + num_dense
        inner = config.expert_hidden[-1]
        last = config.levels - 1
        self.levels = nn.ModuleList(
            ExtractionLevel(inner if level else width, num_tasks, config, level == last)
            for level in range(config.levels)
        )
        self.heads = TaskHeads(num_tasks, config)
        mixed = num_tasks * (config.task_experts + config.shared_experts)
        mixed_by_shared = num_tasks * config.task_experts + config.shared_experts
        self._products = (mixed * config.levels + mixed_by_shared * last) * inner

    @property
    def interaction_products(self) -> int:
        """See :class:`Model`; those of the gates."""
        return self._products

    def logits(self, dense: Tensor, embeddings: Callable[[], Tensor]) -> Tensor:  # noqa: D102
        x = torch.cat([embeddings().flatten(1), dense], 1)
        of_level = [x] * (self.num_tasks + 1)
        for level in self.levels:
            of_level = level(of_level)
        out: Tensor = self.heads(of_level)
        return out
