"""Model parallelism: Listing 1 of *PyTorch RPC* (Li et al., MLSys 2023, section 3), made to run.

The two layers of a model lie on workers p1 and p2. The coordinator p0 holds references to them and
to what they compute: activations travel from p1 to p2 directly, and gradients the same way back.

Run: python examples/rpc_model_parallel.py
On three hosts, N = 0, 1 and 2, with the same PIBROCH_RPC_SECRET:
torchrun --nnodes 3 --node-rank N --master-addr HOST0 --master-port 29500 PROGRAM
"""

import os

import torch
from torch import nn

from pibroch import rpc
from pibroch.ports import free_port
from pibroch.rpc import autograd, optim

NUM_WORKERS = 3
NUM_STEPS = 60


class Layer(nn.Module):
    """A part of the model; it lives on one worker and never leaves it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 20), nn.ReLU())

    def forward(self, input: rpc.RRef) -> torch.Tensor:
        return self.net(input.to_here())  # the value comes from its owner, wherever that is

    def parameter_rrefs(self) -> list[rpc.RRef]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]


class Model:
    """The two layers, as seen from the coordinator."""

    def __init__(self) -> None:
        self.layers = [rpc.remote("p1", Layer), rpc.remote("p2", Layer)]

    def __call__(self, input: rpc.RRef) -> rpc.RRef:
        for layer in self.layers:
            input = layer.remote().forward(input)  # returns at once
        return input

    def parameter_rrefs(self) -> list[rpc.RRef]:
        return [rref for layer in self.layers for rref in layer.rpc_sync().parameter_rrefs()]


def train() -> list[float]:
    """What p0 does: fit the model to a function that it can express."""
    generator = torch.Generator().manual_seed(0)
    teacher = torch.randn(20, 20, generator=generator) / 20**0.5
    model = Model()
    optimizer = optim.DistributedOptimizer(torch.optim.Adam, model.parameter_rrefs(), lr=0.01)
    losses = []
    for _ in range(NUM_STEPS):
        batch = torch.randn(64, 20, generator=generator)
        with autograd.context() as context:
            output = model(rpc.RRef(batch)).to_here()
            loss = nn.functional.mse_loss(output, (batch @ teacher).relu())
            autograd.backward(context, [loss])  # gradients stay where the parameters are
            optimizer.step(context)
        losses.append(loss.item())
    return losses


def work(rank: int) -> None:
    """One worker from start to end."""
    torch.manual_seed(rank)
    rpc.init_rpc(f"p{rank}", rank=rank, world_size=NUM_WORKERS)
    if rank == 0:
        losses = train()
        print(
            f"loss of two layers on two workers: {losses[0]:.4f} in the first step,"
            f" {losses[-1]:.4f} in the last"
        )
        assert losses[-1] < losses[0] / 4
    rpc.shutdown()  # waits until all are done


if __name__ == "__main__":
    if "RANK" in os.environ:  # started by torchrun
        work(int(os.environ["RANK"]))
    else:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        torch.multiprocessing.spawn(work, nprocs=NUM_WORKERS)
