"""FBGEMM's CPU table-batched embeddings, as a module of torch."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.workers import fbgemm
from benchmarks.workers.cell import output_gradient, stored_bags
from benchmarks.workers.kernel import KernelSubject


def build(case: Case) -> KernelSubject:
    """The contender that also updates rows."""
    return _subject(case, updates=True)


def build_lookup(case: Case) -> KernelSubject:
    """The contender that only looks up."""
    return _subject(case, updates=False)


def _subject(case: Case, updates: bool) -> KernelSubject:
    batches = [
        (bags.ids.reshape(-1), None if bags.weights is None else bags.weights.reshape(-1))
        for bags in stored_bags(case)
    ]
    tables = fbgemm.table_batched_embeddings(case)
    offsets = torch.arange(case.num_tables * case.batch_size + 1) * case.ids_per_bag
    gradient = output_gradient(case)

    @torch.no_grad()
    def lookup(batch: int) -> Tensor:
        ids, weights = batches[batch]
        return tables(ids, offsets, weights)

    def lookup_and_update(batch: int) -> None:
        ids, weights = batches[batch]
        tables(ids, offsets, weights).backward(gradient)

    return KernelSubject(lookup, lookup_and_update, fbgemm.versions(), len(batches), updates)
