"""A recommendation model with its table on a parameter server.

The table is too large to have twice, so it lies on a server; trainers look rows up by RPC, and
distributed autograd brings the gradients of those rows back to it. The dense layers are small: each
trainer has a copy, and torch's DistributedDataParallel averages their gradients (*PyTorch RPC*,
Li et al., MLSys 2023, section 4.5).

Run: python examples/rpc_parameter_server.py
On three hosts, N = 0, 1 and 2, with the same PIBROCH_RPC_SECRET:
torchrun --nnodes 3 --node-rank N --master-addr HOST0 --master-port 29500 PROGRAM
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pibroch import rpc
from pibroch.ports import free_port
from pibroch.rpc import autograd, optim

# ranks 0, 1 and 2
SERVER = "server"
TRAINERS = ("trainer1", "trainer2")
# F, D
NUM_ROWS = 2_000
NUM_FEATURES = 6
DIM = 16
# B, of each trainer
NUM_STEPS = 150
BATCH_SIZE = 256


class Table(nn.Embedding):
    """The rows, on the server.

    A lookup's gradient is sparse: it has the rows of the batch, not the table.
    """

    def __init__(self) -> None:
        super().__init__(NUM_ROWS, DIM, sparse=True)
        nn.init.normal_(self.weight, std=0.1)

    def parameter_rrefs(self) -> list[rpc.RRef]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]


class Dense(nn.Module):
    """The layers that every trainer has: products of pairs of rows, and a perceptron over them."""

    def __init__(self) -> None:
        super().__init__()
        num_pairs = NUM_FEATURES * (NUM_FEATURES - 1) // 2
        self.top = nn.Sequential(
            nn.Linear(num_pairs + NUM_FEATURES * DIM, 32), nn.ReLU(), nn.Linear(32, 1)
        )

    def forward(self, rows_BFD: torch.Tensor) -> torch.Tensor:
        products_BFF = rows_BFD @ rows_BFD.transpose(1, 2)
        first, second = torch.triu_indices(NUM_FEATURES, NUM_FEATURES, offset=1)
        return self.top(
            torch.cat([products_BFF[:, first, second], rows_BFD.flatten(1)], 1)
        ).squeeze(1)


def clicks(seed: int):
    """Batches of row numbers [B, F] and labels [B].

    What is liked follows from the row numbers alone.
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(NUM_STEPS):
        ids_BF = torch.randint(NUM_ROWS, (BATCH_SIZE, NUM_FEATURES), generator=generator)
        yield ids_BF, (torch.sin(ids_BF.double()).sum(1) > 0).float()


def train(table: rpc.RRef, seed: int) -> tuple[list[float], torch.Tensor]:
    """What a trainer does when the server asks it to.

    Returns the loss of each step, and its dense layers in the end.
    """
    trainers = dist.new_group(
        [1, 2], use_local_synchronization=True
    )  # the server has no dense layers
    dense = DistributedDataParallel(Dense(), process_group=trainers)
    parameters = table.rpc_sync().parameter_rrefs() + [
        rpc.RRef(parameter) for parameter in dense.parameters()
    ]
    optimizer = optim.DistributedOptimizer(torch.optim.Adagrad, parameters, lr=0.05)
    losses = []
    for ids_BF, labels_B in clicks(seed):
        with autograd.context() as context:
            rows_BFD = table.rpc_sync().forward(ids_BF)
            loss = nn.functional.binary_cross_entropy_with_logits(dense(rows_BFD), labels_B)
            autograd.backward(
                context, [loss]
            )  # averages the gradients of dense layers, sends those of rows
            optimizer.step(
                context
            )  # here and on the server, which does not wait for the other trainer
        losses.append(loss.item())
    return losses, nn.utils.parameters_to_vector(dense.parameters()).detach()


def serve() -> None:
    """What the server does: make the table, have it trained, and report."""
    table = rpc.RRef(Table())
    runs = [
        rpc.rpc_async(name, train, args=(table, seed), timeout=0)
        for seed, name in enumerate(TRAINERS)
    ]
    results = torch.futures.wait_all(runs)
    for name, (losses, _) in zip(TRAINERS, results, strict=True):
        first = sum(losses[:10]) / 10
        last = sum(losses[-10:]) / 10
        print(f"{name}: log loss {first:.4f} in the first ten steps, {last:.4f} in the last ten")
        assert last < first / 2
    assert torch.equal(results[0][1], results[1][1])  # what DistributedDataParallel is for


def work(rank: int) -> None:
    """One worker from start to end."""
    torch.manual_seed(rank)
    torch.sparse.check_sparse_tensor_invariants.disable()  # gradients of rows are right as they are
    dist.init_process_group("gloo", rank=rank, world_size=3)
    rpc.init_rpc((SERVER, *TRAINERS)[rank], rank=rank, world_size=3)
    if rank == 0:
        serve()
    rpc.shutdown()  # waits until all are done
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:  # started by torchrun
        work(int(os.environ["RANK"]))
    else:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        torch.multiprocessing.spawn(work, nprocs=3)
