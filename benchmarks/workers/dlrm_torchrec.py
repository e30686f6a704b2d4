"""TorchRec's DLRM as its users train it.

Planner and ``DistributedModelParallel``, here in a group of one process.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from benchmarks.cases import Case
from benchmarks.workers import fbgemm
from benchmarks.workers.dlrm import TrainingSubject
from benchmarks.workers.dlrm_torchrec_fused import OPTIMIZERS
from benchmarks.workers.torchrec_model import empty_collection, subject, torchrec_dlrm


def build(case: Case) -> TrainingSubject:
    """The contender for one case."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(case.threads)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    collection = empty_collection(case)
    model = torchrec_dlrm(collection, case)
    arguments = {"lr": case.sparse_lr} | (
        {} if case.sparse_optimizer == "sgd" else {"eps": case.eps}
    )
    apply_optimizer_in_backward(
        OPTIMIZERS[case.sparse_optimizer], collection.parameters(), arguments
    )
    sharded = _shard(model, case)
    _load_tables(sharded, case)
    return subject(sharded, model.sparse_arch, case)


def _shard(model: nn.Module, case: Case) -> DistributedModelParallel:
    sharders = [EmbeddingBagCollectionSharder()]
    topology = Topology(world_size=1, compute_device="cpu", local_world_size=1)
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=case.batch_size)
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)


def _load_tables(sharded: nn.Module, case: Case) -> None:
    """Copy the starting weights into the fused operators.

    TorchRec keeps these out of ``modules()``.
    """
    collections = (
        module for module in sharded.modules() if isinstance(module, ShardedEmbeddingBagCollection)
    )
    lookups = [lookup for collection in collections for lookup in collection._lookups]
    fused = [fused for lookup in lookups for fused in lookup._emb_modules]
    orders = [
        [int(table.name[1:]) for table in operator.config.embedding_tables] for operator in fused
    ]
    assert sorted(table for order in orders for table in order) == list(range(case.num_tables)), (
        orders
    )
    for operator, order in zip(fused, orders, strict=True):
        fbgemm.load_tables(operator.emb_module, case, order)
