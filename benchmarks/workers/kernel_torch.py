"""Torch's own lookups with sparse gradients.

A table is an ``nn.EmbeddingBag`` or an ``nn.Embedding`` (an ``index_select``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from benchmarks.cases import Case, initial_table
from benchmarks.workers.dlrm import torch_batches
from benchmarks.workers.dlrm_torch import sparse_optimizer
from benchmarks.workers.kernel import KernelSubject, output_gradient


def build(case: Case) -> KernelSubject:
    """``nn.EmbeddingBag(sparse=True)`` per table."""
    offsets = torch.arange(case.batch_size)
    bags = [
        nn.EmbeddingBag(*_shape(case), mode="sum", sparse=True, _weight=_weight(case, t))
        for t in _tables(case)
    ]
    return _subject(case, bags, lambda bag, ids: bag(ids, offsets))


def build_select(case: Case) -> KernelSubject:
    """``nn.Embedding(sparse=True)`` per table: bags of one id need no pooling."""
    tables = [
        nn.Embedding(*_shape(case), sparse=True, _weight=_weight(case, t)) for t in _tables(case)
    ]
    return _subject(case, tables, lambda table, ids: table(ids))


def _subject(
    case: Case, tables: Sequence[nn.Module], look: Callable[[nn.Module, Tensor], Tensor]
) -> KernelSubject:
    ids_NFB, _, _ = torch_batches(case)
    weights = [parameter for table in tables for parameter in table.parameters()]
    optimizer = sparse_optimizer(weights, case)
    gradients = [gradient.contiguous() for gradient in output_gradient(case).unbind(1)]

    def rows(batch: int) -> list[Tensor]:
        return [look(table, ids) for table, ids in zip(tables, ids_NFB[batch], strict=True)]

    @torch.no_grad()
    def lookup(batch: int) -> Tensor:
        return torch.stack(rows(batch), 1)

    def lookup_and_update(batch: int) -> None:
        optimizer.zero_grad()
        torch.autograd.backward(rows(batch), gradients)
        optimizer.step()

    return KernelSubject(lookup, lookup_and_update, {"torch": torch.__version__}, len(ids_NFB))


def _shape(case: Case) -> tuple[int, int]:
    return case.num_rows, case.dim


def _tables(case: Case) -> range:
    return range(case.num_tables)


def _weight(case: Case, table: int) -> Tensor:
    return torch.from_numpy(initial_table(case, table))
