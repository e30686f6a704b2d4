"""A rank of topic ``tables`` on TorchRec.

Sharded collections, with and without the training pipeline.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    KeyedTensor,
)
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from benchmarks.cases import Case
from benchmarks.workers import fbgemm
from benchmarks.workers import tables_heads as heads
from benchmarks.workers.dlrm_torchrec_fused import OPTIMIZERS
from benchmarks.workers.ranks import RankSubject, batch_order, join, rank_batches


class Model(nn.Module):
    """A collection and a fixed head."""

    def __init__(self, collection: nn.Module, loss_of: Callable[[Any, Batch], Tensor]) -> None:
        super().__init__()
        self.collection = collection
        self._loss_of = loss_of

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Loss, and what the pipeline wants besides."""
        loss = self._loss_of(self.collection(batch.sparse_features), batch)
        return loss, loss.detach()


@dataclass
class Built:
    """A sharded model and its batches."""

    model: DistributedModelParallel
    batches: list[Batch]


def build(case: Case) -> RankSubject:
    """Tables of the case's width, or of many: one step after the other."""
    return _plain(_pooled(case))


def build_pipelined(case: Case) -> RankSubject:
    """With ``TrainPipelineSparseDist``."""
    return _pipelined(_pooled(case))


def build_sequences(case: Case) -> RankSubject:
    """One table, read id by id."""
    return _plain(_sequences(case))


def build_sequences_pipelined(case: Case) -> RankSubject:
    """With ``TrainPipelineSparseDist``."""
    return _pipelined(_sequences(case))


def _plain(built: Built) -> RankSubject:
    def losses() -> Iterator[Tensor]:
        for number in batch_order(len(built.batches)):
            loss, detached = built.model(built.batches[number])
            loss.backward()
            yield detached

    return RankSubject(losses(), fbgemm.versions())


def _pipelined(built: Built) -> RankSubject:
    class Nothing:
        """There are no dense parameters to update."""

        def zero_grad(self) -> None:
            """Nothing."""

        def step(self) -> None:
            """Nothing."""

    pipeline = TrainPipelineSparseDist(built.model, Nothing(), device=torch.device("cpu"))
    batches = (built.batches[number] for number in batch_order(len(built.batches)))

    def losses() -> Iterator[Tensor]:
        while True:
            yield pipeline.progress(batches)

    return RankSubject(losses(), fbgemm.versions())


def _pooled(case: Case) -> Built:
    join(case)
    keys = [f"C{t}" for t in range(case.num_tables)]
    configs = [
        EmbeddingBagConfig(
            name=f"t{t}",
            embedding_dim=heads.width_of(case, t),
            num_embeddings=case.num_rows,
            feature_names=[key],
        )
        for t, key in enumerate(keys)
    ]
    weights = heads.head(case, sum(config.embedding_dim for config in configs))
    collection = EmbeddingBagCollection(device=torch.device("meta"), tables=configs)

    def loss_of(out: KeyedTensor, batch: Batch) -> Tensor:
        side_by_side = torch.cat(
            [out[key] for key in keys], 1
        )  # sharded collections have orders of their own
        return heads.loss_of_pooled(side_by_side, weights, batch.labels)

    model = Model(collection, loss_of)
    ids_NFB, dense_NBn, labels_NB = rank_batches(case)
    lengths = torch.ones(case.num_tables * case.batch_size, dtype=torch.int32)
    batches = [
        Batch(dense, KeyedJaggedTensor.from_lengths_sync(keys, ids_FB.reshape(-1), lengths), labels)
        for ids_FB, dense, labels in zip(ids_NFB, dense_NBn, labels_NB, strict=True)
    ]
    return Built(_sharded(model, EmbeddingBagCollectionSharder(), case), batches)


def _sequences(case: Case) -> Built:
    join(case)
    config = EmbeddingConfig(
        name="t0", embedding_dim=case.dim, num_embeddings=case.num_rows, feature_names=["C0"]
    )
    weights = heads.head(case, case.dim)
    collection = EmbeddingCollection(device=torch.device("meta"), tables=[config])
    model = Model(
        collection,
        lambda out, batch: heads.loss_of_sequences(out["C0"].values(), weights, batch.labels),
    )
    ids_NFB, dense_NBn, labels_NB = rank_batches(case)
    lengths = torch.full((case.batch_size,), ids_NFB.shape[1], dtype=torch.int32)
    batches = [
        Batch(dense, KeyedJaggedTensor.from_lengths_sync(["C0"], values, lengths), labels)
        for values, dense, labels in zip(
            heads.sequences(ids_NFB), dense_NBn, labels_NB, strict=True
        )
    ]
    return Built(_sharded(model, EmbeddingCollectionSharder(), case), batches)


def _sharded(model: Model, sharder: object, case: Case) -> DistributedModelParallel:
    logging.disable(logging.WARNING)
    arguments = {"lr": case.sparse_lr} | (
        {} if case.sparse_optimizer == "sgd" else {"eps": case.eps}
    )
    apply_optimizer_in_backward(
        OPTIMIZERS[case.sparse_optimizer], model.collection.parameters(), arguments
    )
    topology = Topology(world_size=dist.get_world_size(), compute_device="cpu", local_world_size=1)
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=case.batch_size)
    plan = planner.collective_plan(model, [sharder], dist.GroupMember.WORLD)
    sharded = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan, sharders=[sharder]
    )
    with torch.no_grad():
        for name, value in sharded.state_dict().items():
            assert isinstance(value, ShardedTensor), f"{name}: not sharded"
            table = heads.weights_of(case, int(name.split(".")[-2].removeprefix("t")))
            for shard in value.local_shards():
                (row, column) = shard.metadata.shard_offsets
                (rows, columns) = shard.tensor.shape
                shard.tensor.copy_(
                    torch.from_numpy(table[row : row + rows, column : column + columns])
                )
    return sharded
