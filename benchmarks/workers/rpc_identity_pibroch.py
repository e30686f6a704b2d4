"""The identity example with pibroch.rpc: what its user writes.

Run once with RANK=0 and once with RANK=1.
"""

import os

import torch

from pibroch import rpc


def identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 1:
        argument = torch.rand(1000, 1000)
        assert torch.equal(rpc.rpc_sync("worker0", identity, (argument,)), argument)
    rpc.shutdown()
