"""What the contenders of a cell share: bags of equal length, feature by feature.

Shape legend: N batches, F features, B samples, L ids of a bag, D dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.workers.dlrm import torch_batches

WEIGHT_STEPS = 64


@dataclass(frozen=True, slots=True)
class Bags:
    """A batch.

    Attributes:
        ids: int64 ``[F, B * L]``, each feature's bags in the order of the samples.
        weights: float32 of the same shape, ``None`` where bags are not weighted.
    """

    ids: Tensor
    weights: Tensor | None


def stored_bags(case: Case) -> list[Bags]:
    """All batches. Also sets torch's threads."""
    ids_NFV, _, _ = torch_batches(case)
    return [Bags(ids, _weights(ids) if case.pooling == "weighted" else None) for ids in ids_NFV]


def _weights(ids: Tensor) -> Tensor:
    """Some weights around 1, the same for every contender."""
    return (ids % WEIGHT_STEPS).float() / WEIGHT_STEPS + 0.5


def output_gradient(case: Case) -> Tensor:
    """The gradient that every batch's pooled rows get, float32 ``[B, F * D]``."""
    generator = torch.Generator().manual_seed(case.seed)
    shape = case.batch_size, case.num_tables * case.dim
    return torch.randn(shape, generator=generator) * 1e-2
