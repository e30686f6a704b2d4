"""TorchRec's own way to several ranks, tables whole on one of them each.

What its planner would do with larger ones.
"""

import torch
import torch.distributed as dist
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_parallel import get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.optim.keyed import KeyedOptimizerWrapper


def shard(model, tables):
    """The model over ranks."""
    topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
    constraints = {table: ParameterConstraints(sharding_types=["table_wise"]) for table in tables}
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    sharders = get_default_sharders()
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)


def dense_optimizer(model, make):
    """Of all parameters but the tables, which are updated in backward."""
    fused = set(model.fused_optimizer.params)
    dense = {
        name: each
        for name, each in model.named_parameters()
        if name not in fused and each.requires_grad
    }
    return KeyedOptimizerWrapper(dense, make)
