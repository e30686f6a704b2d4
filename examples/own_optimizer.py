"""An optimizer of one's own: Lion, on the rows that a batch touches.

See docs/extending/optimizer.md.

python examples/own_optimizer.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

import pibroch as pb
from pibroch.config.optimizer import SparseOptimizerConfig
from pibroch.embedding.optimizers import SparseOptimizer
from pibroch.kernels.arrays import Records
from pibroch.kernels.policy import kernel
from pibroch.kernels.scatter_update import ROWS_AT_ONCE, Grouped, Hyper, combine


@kernel
def lion(
    records: Records, grouped: Grouped, gradients: Records, hyper: Hyper, start: int, stop: int
) -> None:
    """``w -= lr * sign(beta1 * m + (1 - beta1) * g); m = beta2 * m + (1 - beta2) * g``.

    State: momentum ``[D]``.
    """
    dim = gradients.shape[1] * grouped.rows_per_gradient
    rows = grouped.rows
    totals = np.empty((ROWS_AT_ONCE, dim), np.float32)
    fresh1 = np.float32(1.0) - hyper.beta1
    fresh2 = np.float32(1.0) - hyper.beta2
    for first in range(start, stop, ROWS_AT_ONCE):
        last = min(first + ROWS_AT_ONCE, stop)
        combine(records, grouped, gradients, hyper, first, last, totals)
        for u in range(first, last):
            row = rows[u]
            i = u - first
            for d in range(dim):
                mean = records[row, dim + d]
                records[row, d] -= hyper.lr * np.sign(mean + fresh1 * (totals[i, d] - mean))
                records[row, dim + d] = mean + fresh2 * (totals[i, d] - mean)


class LionConfig(SparseOptimizerConfig):
    """`[embedding.optimizer]` of a recipe, beside `lr`, `weight_decay` and `max_row_norm`."""

    betas: tuple[float, float] = (0.9, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lion(SparseOptimizer):
    """Lion (Chen et al. 2023) on touched rows."""

    betas: tuple[float, float] = (0.9, 0.99)

    section: ClassVar[type[SparseOptimizerConfig]] = LionConfig
    kernel: ClassVar[Callable[..., Any]] = staticmethod(lion)

    def moments(self, dim: int) -> dict[str, int]:
        """A momentum an element."""
        return {"exp_avg": dim}

    def hyper(self, learning_rate: float, step: int) -> Hyper:
        """Both betas beside what every optimizer has."""
        return (
            super(Lion, self)
            .hyper(learning_rate, step)
            ._replace(beta1=self.betas[0], beta2=self.betas[1])
        )


def main() -> None:
    """Train on it, with a table under another optimizer beside it."""
    torch.manual_seed(0)
    ids = torch.randint(0, 50, (2, 4000)) ** 2 // 50
    labels = ((ids[0] % 3 == 0) & (ids[1] % 2 == 0)).float()
    tables = [pb.Table(name, 50, 8, initializer=pb.Normal(std=0.3)) for name in ("item", "user")]
    embeddings = pb.Embeddings(
        tables, {"": Lion(lr=0.01, weight_decay=1e-3, decoupled=True), "user": pb.Adam(lr=0.02)}
    )
    batches = [
        pb.JaggedBatch.from_one_hot(
            torch.zeros(200, 0), ["item", "user"], ids[:, at : at + 200], labels[at : at + 200]
        )
        for at in range(0, 4000, 200)
    ]
    losses = []
    for batch in embeddings.feed(batches * 10):
        logits = embeddings(batch).prod(1).sum(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        loss.backward()
        losses.append(loss.item())
    fields = sorted(embeddings.full_state_dict(["item"], row_state=True))
    print(
        f"log loss {losses[0]:.3f} to {losses[-1]:.3f}; of the rows of `item` are kept"
        f" {', '.join(fields)}"
    )


if __name__ == "__main__":
    main()
