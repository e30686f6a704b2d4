"""A rank of DLRM, or of another model, on TorchRec.

Planner, ``DistributedModelParallel``, with and without its pipeline.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.models.dlrm import DLRMTrain, SparseArch
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper

from benchmarks.cases import Case, initial_table
from benchmarks.workers import fbgemm
from benchmarks.workers.dlrm_torchrec_fused import OPTIMIZERS
from benchmarks.workers.parts import Parts
from benchmarks.workers.plain_models import plain_model
from benchmarks.workers.ranks import RankSubject, in_order, join, rank_batches
from benchmarks.workers.torchrec_model import empty_collection, torchrec_dlrm
from benchmarks.workers.torchrec_parts import record_parts


class OtherTrain(nn.Module):
    """A model that TorchRec does not have, trained as its ``DLRMTrain`` trains DLRM."""

    def __init__(self, collection: EmbeddingBagCollection, case: Case) -> None:
        super().__init__()
        self.sparse = SparseArch(collection)
        self.dense = plain_model(case)

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Loss, and what ``DLRMTrain`` gives besides."""
        logits = self.dense(batch.dense_features, self.sparse(batch.sparse_features))
        loss = binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (loss.detach(), logits.detach(), batch.labels.detach())


def build(case: Case) -> RankSubject:
    """Forward, backward and step one after the other."""
    (model, optimizer) = _sharded(case)
    batches = _batches(case)

    def losses() -> Iterator[Tensor]:
        for batch in batches:
            optimizer.zero_grad()
            loss, _ = model(batch)
            loss.backward()
            optimizer.step()
            yield loss.detach()

    return RankSubject(losses(), fbgemm.versions())


def build_pipelined(case: Case) -> RankSubject:
    """``TrainPipelineSparseDist``: the ids of the next batch travel beside the current one."""
    (model, optimizer) = _sharded(case)
    batches = _batches(case)
    pipeline = TrainPipelineSparseDist(model, optimizer, device=torch.device("cpu"))
    parts = Parts(case.reports_parts)
    record_parts(pipeline, model, parts)

    def losses() -> Iterator[Tensor]:
        while True:
            loss, _, _ = pipeline.progress(batches)
            yield loss

    return RankSubject(losses(), fbgemm.versions(), parts=parts)


def _sharded(case: Case) -> tuple[DistributedModelParallel, KeyedOptimizerWrapper]:
    """Model and dense optimizer of this rank."""
    logging.disable(logging.WARNING)
    join(case)
    collection = empty_collection(case)
    model = (
        DLRMTrain(torchrec_dlrm(collection, case))
        if case.model == "dlrm"
        else OtherTrain(collection, case)
    )
    arguments = {"lr": case.sparse_lr} | (
        {} if case.sparse_optimizer == "sgd" else {"eps": case.eps}
    )
    apply_optimizer_in_backward(
        OPTIMIZERS[case.sparse_optimizer], collection.parameters(), arguments
    )
    sharded = _shard(model, case)
    _load_tables(sharded, case)
    dense = KeyedOptimizerWrapper(
        {
            name: parameter
            for name, parameter in sharded.named_parameters()
            if parameter.requires_grad
        },
        lambda parameters: torch.optim.SGD(parameters, lr=case.dense_lr),
    )
    return sharded, dense


def _shard(model: nn.Module, case: Case) -> DistributedModelParallel:
    sharders = [EmbeddingBagCollectionSharder()]
    topology = Topology(world_size=dist.get_world_size(), compute_device="cpu", local_world_size=1)
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=case.batch_size)
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)


@torch.no_grad()
def _load_tables(sharded: nn.Module, case: Case) -> None:
    """Copy the starting weights into this rank's shards, whatever rows and columns they hold."""
    for name, value in sharded.state_dict().items():
        if "embedding_bags." not in name:
            continue
        assert isinstance(value, ShardedTensor), (
            f"{name}: optimizers in backward are not for data-parallel tables"
        )
        table = initial_table(case, int(name.split(".")[-2].removeprefix("t")))
        for shard in value.local_shards():
            (row, column) = shard.metadata.shard_offsets
            (rows, columns) = shard.tensor.shape
            shard.tensor.copy_(torch.from_numpy(table[row : row + rows, column : column + columns]))


def _batches(case: Case) -> Iterator[Batch]:
    ids_NFB, dense_NBn, labels_NB = rank_batches(case)
    keys = [f"C{table}" for table in range(case.num_tables)]
    lengths = torch.ones(case.num_tables * case.batch_size, dtype=torch.int32)
    stored = [
        Batch(dense, KeyedJaggedTensor.from_lengths_sync(keys, ids_FB.reshape(-1), lengths), labels)
        for ids_FB, dense, labels in zip(ids_NFB, dense_NBn, labels_NB, strict=True)
    ]
    return in_order(stored)
