"""pibroch's lookup and update as its ``local`` exchange runs them.

With id checks and grouping, without autograd.
"""

from __future__ import annotations

from itertools import count

from torch import Tensor

from benchmarks.cases import Case
from benchmarks.workers import pibroch_tables as ours
from benchmarks.workers.dlrm import torch_batches
from benchmarks.workers.kernel import KernelSubject, output_gradient
from pibroch.embedding import MemoryShard, group_tables
from pibroch.exchange.base import Rates
from pibroch.exchange.local.exchange import LocalExchange


def build(case: Case) -> KernelSubject:
    """The contender for one case."""
    batches = ours.jagged_batches(*torch_batches(case))
    exchange = LocalExchange(group_tables(ours.tables(case), ours.sparse_optimizer(case)), seed=0)
    (shard,) = exchange.shards
    assert isinstance(shard, MemoryShard), "tables are in memory"
    ours.load_tables(shard, case)
    gradient = output_gradient(case)
    steps = count(1)

    def lookup(batch: int) -> Tensor:
        return exchange.lookup(batches[batch], True)[0][0]

    def lookup_and_update(batch: int) -> None:
        _, looked_up = exchange.lookup(batches[batch], True)
        exchange.update(looked_up, [gradient], Rates([case.sparse_lr], next(steps)))

    return KernelSubject(lookup, lookup_and_update, ours.versions(), len(batches))
