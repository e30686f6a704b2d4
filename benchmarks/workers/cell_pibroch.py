"""pibroch's module as users call it: all its checks, and autograd where rows are updated."""

from __future__ import annotations

import torch
from torch import Tensor

import pibroch as pb
from benchmarks.cases import Case
from benchmarks.workers import pibroch_tables as ours
from benchmarks.workers.cell import Bags, output_gradient, stored_bags
from benchmarks.workers.kernel import KernelSubject


def build(case: Case) -> KernelSubject:
    """The contender that also updates rows."""
    return _subject(case, updates=True)


def build_lookup(case: Case) -> KernelSubject:
    """The contender that only looks up."""
    return _subject(case, updates=False)


def _subject(case: Case, updates: bool) -> KernelSubject:
    batches = [_batch(case, bags) for bags in stored_bags(case)]
    optimizer = ours.sparse_optimizer(case)
    embeddings = pb.Embeddings(ours.tables(case), optimizer=optimizer)
    ours.load_tables(embeddings.shard, case)
    embeddings.train(updates)
    gradient = output_gradient(case)

    @torch.no_grad()
    def lookup(batch: int) -> Tensor:
        pooled: Tensor = embeddings(batches[batch])
        return pooled

    def lookup_and_update(batch: int) -> None:
        embeddings(batches[batch]).backward(gradient.view(len(gradient), -1, case.dim))

    return KernelSubject(lookup, lookup_and_update, ours.versions(), len(batches), updates)


def _batch(case: Case, bags: Bags) -> pb.JaggedBatch:
    """A batch as a loader hands it out."""
    size = case.batch_size
    keys = [f"C{table}" for table in range(case.num_tables)]
    dense, labels = torch.zeros(size, 0), torch.zeros(size)
    if case.ids_per_bag == 1 and bags.weights is None:
        return pb.JaggedBatch.from_one_hot(dense, keys, bags.ids, labels)
    offsets = torch.arange(case.num_tables * size + 1) * case.ids_per_bag
    weights = None if bags.weights is None else bags.weights.view(-1)
    return pb.JaggedBatch(dense, tuple(keys), bags.ids.view(-1), offsets, labels, weights)
