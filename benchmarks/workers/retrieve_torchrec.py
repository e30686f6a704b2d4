"""A rank that looks rows up, or trains tables alone, with TorchRec.

By its sharded collection and its planner's plan.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from benchmarks.cases import Case
from benchmarks.workers import fbgemm
from benchmarks.workers.distributed_torchrec import _load_tables, _shard
from benchmarks.workers.dlrm_torchrec_fused import OPTIMIZERS
from benchmarks.workers.ranks import RankSubject, in_order, join, rank_batches
from benchmarks.workers.torchrec_model import empty_collection


class TablesAlone(nn.Module):
    """A collection as a model."""

    def __init__(self, collection: EmbeddingBagCollection) -> None:
        super().__init__()
        self.collection = collection

    def forward(self, batch: KeyedJaggedTensor) -> Tensor:
        """A figure of all embeddings."""
        figure: Tensor = self.collection(batch).values().square().mean()
        return figure


def build(case: Case) -> RankSubject:
    """Lookups."""
    model = _sharded(case)
    batches = _batches(case)
    model.eval()

    def losses() -> Iterator[Tensor]:
        for batch in batches:
            with torch.no_grad():
                figure: Tensor = model(batch)
            yield figure

    return RankSubject(losses(), fbgemm.versions())


def train(case: Case) -> RankSubject:
    """Lookups and updates."""
    model = _sharded(case)
    batches = _batches(case)

    def losses() -> Iterator[Tensor]:
        for batch in batches:
            loss = model(batch)
            loss.backward()
            yield loss.detach()

    return RankSubject(losses(), fbgemm.versions())


def _sharded(case: Case) -> DistributedModelParallel:
    join(case)
    collection = empty_collection(case)
    arguments = {"lr": case.sparse_lr} | (
        {} if case.sparse_optimizer == "sgd" else {"eps": case.eps}
    )
    apply_optimizer_in_backward(
        OPTIMIZERS[case.sparse_optimizer], collection.parameters(), arguments
    )
    sharded = _shard(TablesAlone(collection), case)
    _load_tables(sharded, case)
    return sharded


def _batches(case: Case) -> Iterator[KeyedJaggedTensor]:
    ids_NFB = rank_batches(case)[0]
    keys = [f"C{table}" for table in range(case.num_tables)]
    lengths = torch.ones(case.num_tables * case.batch_size, dtype=torch.int32)
    stored = [
        KeyedJaggedTensor.from_lengths_sync(keys, ids_FB.reshape(-1), lengths) for ids_FB in ids_NFB
    ]
    return in_order(stored)
