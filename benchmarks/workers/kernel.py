"""What the kernel contenders share: timed phases, gradients, the check.

Torch alone, no pibroch, no FBGEMM.

Shape legend: B samples, F features, D dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.workers.dlrm import movement


@dataclass(frozen=True, slots=True)
class KernelSubject:
    """Lookup alone, and lookup with the update that a given gradient causes.

    Attributes:
        lookup: pooled rows of a stored batch, any layout.
        lookup_and_update: the same, then rows updated.
        package_versions: packages that matter.
        num_batches: stored batches N.
        updates: whether the check updates rows, too.
    """

    lookup: Callable[[int], Tensor]
    lookup_and_update: Callable[[int], object]
    package_versions: dict[str, str]
    num_batches: int
    updates: bool = True

    def phases(self) -> dict[str, Callable[[int], object]]:
        """Both phases on the stored batches in turn."""
        return {
            "lookup": lambda batch: self.lookup(batch % self.num_batches),
            "lookup+update": lambda batch: self.lookup_and_update(batch % self.num_batches),
        }

    def check(self, steps: int) -> dict[str, list[float]]:
        """``pooled`` (sum of absolute values) before and ``row_movement`` by each update."""
        values: dict[str, list[float]] = {"pooled": []}
        if self.updates:
            values["row_movement"] = []
        for batch in (step % self.num_batches for step in range(steps)):
            before = self.lookup(batch).clone()
            values["pooled"].append(movement(torch.zeros_like(before), before))
            if self.updates:
                self.lookup_and_update(batch)
                values["row_movement"].append(movement(before, self.lookup(batch)))
        return values

    def versions(self) -> dict[str, str]:
        """Versions of the packages used."""
        return self.package_versions


def output_gradient(case: Case) -> Tensor:
    """The gradient that every batch's pooled rows get, float32 ``[B, F, D]``."""
    generator = torch.Generator().manual_seed(case.seed)
    return torch.randn(case.batch_size, case.num_tables, case.dim, generator=generator) * 1e-2
