"""FBGEMM's CPU table-batched embeddings: forward, and backward with the fused optimizer."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.workers import fbgemm
from benchmarks.workers.dlrm import torch_batches
from benchmarks.workers.kernel import KernelSubject, output_gradient


def build(case: Case) -> KernelSubject:
    """The contender for one case."""
    ids_NFB, _, _ = torch_batches(case)
    tables = fbgemm.table_batched_embeddings(case)
    offsets = torch.arange(case.num_tables * case.batch_size + 1)
    gradient = output_gradient(case).flatten(1)

    @torch.no_grad()
    def lookup(batch: int) -> Tensor:
        return tables(ids_NFB[batch].reshape(-1), offsets)

    def lookup_and_update(batch: int) -> None:
        tables(ids_NFB[batch].reshape(-1), offsets).backward(gradient)

    return KernelSubject(lookup, lookup_and_update, fbgemm.versions(), len(ids_NFB))
