"""MMoE: several tasks that share experts, each through a gate of its own.

Ma et al., "Modeling Task Relationships in Multi-task Learning with Multi-gate Mixture-of-Experts",
KDD 2018. With ``x`` all features and experts ``f_i``, the logit of task k is ``h_k(f^k(x))``,
``f^k(x) = sum_i g^k(x)_i f_i(x)``, ``g^k(x) = softmax(W_k x)`` (Eq. 6 and 7).

Shape legend: B samples, T tasks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pibroch.config.model_zoo import MMoEConfig
from pibroch.models.base import MultiTaskModel
from pibroch.models.experts import Experts, Gate, TaskHeads


class MMoE(MultiTaskModel):
    """Shared experts, and a gate and a network for each task."""

    section = MMoEConfig

    def __init__(
        self, num_dense: int, num_features: int, config: MMoEConfig, num_tasks: int = 1
    ) -> None:
        super().__init__(num_dense, num_features, config, num_tasks)
        width = num_features * config.dim + num_dense
        self.experts = Experts(config.experts, width, config)
        self.gates = nn.ModuleList(Gate(width, config.experts) for _ in range(num_tasks))
        self.heads = TaskHeads(num_tasks, config)
        self._products = num_tasks * config.experts * config.expert_hidden[-1]

    @property
    def interaction_products(self) -> int:
        """See :class:`Model`; those of the gates."""
        return self._products

    def logits(self, dense: Tensor, embeddings: Callable[[], Tensor]) -> Tensor:  # noqa: D102
        x = torch.cat([embeddings().flatten(1), dense], 1)
        experts = self.experts(x)
        out: Tensor = self.heads([gate(x, experts) for gate in self.gates])
        return out
