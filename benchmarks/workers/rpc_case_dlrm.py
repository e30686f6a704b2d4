"""A recommendation model whose table lies on a parameter server.

Trainers average dense gradients by torch's DDP.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.workers.rpc_case_sizes import Sizes
from benchmarks.workers.rpc_case_weights import seeded
from benchmarks.workers.rpc_library import DistributedOptimizer, autograd, rpc
from pibroch.ports import free_port

NUM_FEATURES = 26


class Table(nn.Embedding):
    """The rows; gradients of a lookup have those of the batch alone."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes.rows, sizes.dim, sparse=True)
        seeded(self, 0)

    def reference(self) -> Any:
        """Of the rows."""
        return rpc.RRef(self.weight)


class Trainer:
    """Dense layers, of which each trainer has a copy."""

    def __init__(self, place: int, count: int, meet: str, table: Any, sizes: Sizes) -> None:
        dist.init_process_group("gloo", init_method=meet, rank=place, world_size=count)
        self.place = place
        self.sizes = sizes
        self.table = table
        layers = nn.Sequential(
            nn.Linear(NUM_FEATURES * sizes.dim, 512),
            nn.ReLU(),
            nn.Linear(512, 256),
            nn.ReLU(),
            nn.Linear(256, 1),
        )
        self.dense = DistributedDataParallel(seeded(layers, 1))
        references = [table.rpc_sync().reference()]
        references += [rpc.RRef(parameter) for parameter in self.dense.parameters()]
        self.optimizer = DistributedOptimizer(torch.optim.SGD, references, lr=0.05)

    def step(self, number: int) -> float:
        """Look up, forward, backward, one step of all parameters; returns the loss."""
        generator = torch.Generator().manual_seed(1000 * number + self.place)
        shape = (self.sizes.samples, NUM_FEATURES)
        ids_BF = torch.randint(self.sizes.rows, shape, generator=generator)
        labels_B = (torch.sin(ids_BF.double()).sum(1) > 0).float()
        with autograd.context() as context:
            rows_BFD = self.table.rpc_sync().forward(ids_BF)
            logits_B = self.dense(rows_BFD.flatten(1)).squeeze(1)
            loss: Tensor = nn.functional.binary_cross_entropy_with_logits(logits_B, labels_B)
            autograd.backward(context, [loss])  # no trainer is through before all have looked up
            self.optimizer.step(context)
        return loss.item()


class ParameterServer:
    """The driver's side: the first worker has the table, the others train."""

    def __init__(self, workers: list[str], sizes: Sizes) -> None:
        self._table = rpc.remote(workers[0], Table, args=(sizes,))
        trainers = workers[1:]
        meet = f"tcp://127.0.0.1:{free_port()}"
        self._trainers = [
            rpc.remote(worker, Trainer, args=(place, len(trainers), meet, self._table, sizes))
            for place, worker in enumerate(trainers)
        ]

    def step(self, number: int) -> float:
        """One global batch."""
        losses = [trainer.rpc_async(timeout=0).step(number) for trainer in self._trainers]
        return sum(each.wait() for each in losses) / len(losses)
