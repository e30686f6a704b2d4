"""torch's ``nn.EmbeddingBag(sparse=True)``, one a table, and an optimizer for sparse gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.cases import Case, initial_table
from benchmarks.workers.cell import output_gradient, stored_bags
from benchmarks.workers.dlrm_torch import sparse_optimizer
from benchmarks.workers.kernel import KernelSubject


def build(case: Case) -> KernelSubject:
    """The contender that also updates rows."""
    return _subject(case, updates=True)


def build_lookup(case: Case) -> KernelSubject:
    """The contender that only looks up."""
    return _subject(case, updates=False)


def _subject(case: Case, updates: bool) -> KernelSubject:
    batches = [
        (
            list(bags.ids.unbind()),
            [None] * case.num_tables if bags.weights is None else list(bags.weights.unbind()),
        )
        for bags in stored_bags(case)
    ]
    offsets = torch.arange(case.batch_size) * case.ids_per_bag
    tables = [
        nn.EmbeddingBag(
            case.num_rows,
            case.dim,
            mode="mean" if case.pooling == "mean" else "sum",
            sparse=True,
            _weight=torch.from_numpy(initial_table(case, table)),
        )
        for table in range(case.num_tables)
    ]
    weights = [parameter for table in tables for parameter in table.parameters()]
    optimizer = sparse_optimizer(weights, case) if updates else None
    gradient = output_gradient(case)
    gradients = [part.contiguous() for part in gradient.split(case.dim, 1)]

    def rows(batch: int) -> list[Tensor]:
        return [
            table(ids, offsets, factors)
            for table, ids, factors in zip(tables, *batches[batch], strict=True)
        ]

    @torch.no_grad()
    def lookup(batch: int) -> Tensor:
        pooled = rows(batch)
        return pooled[0] if len(pooled) == 1 else torch.cat(pooled, 1)

    def lookup_and_update(batch: int) -> None:
        assert optimizer is not None, "a contender that updates"
        optimizer.zero_grad()
        torch.autograd.backward(rows(batch), gradients)
        optimizer.step()

    versions = {"torch": str(torch.__version__)}
    return KernelSubject(lookup, lookup_and_update, versions, len(batches), updates)
