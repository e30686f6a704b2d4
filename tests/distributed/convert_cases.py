"""What TorchRec's users have on their disks.

Tables cut over ranks, in the files of each and in DCP's folders.
"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as OnDim


def cut(table, kind):
    """A table as a ShardedTensor of blocks of rows, or of columns, or as a DTensor."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    if kind == "dtensor":
        block = table.chunk(size)[rank]
        mesh = init_device_mesh("cpu", (size,))
        return DTensor.from_local(block, mesh, [OnDim(0)], shape=table.shape, stride=table.stride())
    dim = int(kind == "columns")
    first = sum(part.shape[dim] for part in table.chunk(size, dim)[:rank])
    part = table.chunk(size, dim)[rank].contiguous()
    shard = Shard.from_tensor_and_offsets(part, [0, first] if dim else [first, 0], rank)
    return sharded_tensor.init_from_local_shards([shard], *table.shape)


def write(channel, model, folder, kind):
    """``model.pt``: whole, as each rank's file, and as a folder of DCP.

    In nested dictionaries, with an optimizer's state.
    """
    state = torch.load(model, weights_only=True)
    own = {
        name: cut(tensor, kind) if "embedding_bags" in name else tensor
        for name, tensor in state.items()
    }
    moments = {
        f"{name}.momentum1": tensor for name, tensor in own.items() if "embedding_bags" in name
    }
    nested = {"app": {"model": own, "optimizer": {"state": moments, "lr": 0.5}, "epoch": 3}}
    dcp.save(nested, checkpoint_id=folder / "dcp")
    if kind != "dtensor":
        (folder / "files").mkdir(exist_ok=True)
        torch.save(nested, folder / "files" / f"rank{channel.ranks.rank}.pt")
    channel.barrier()
