"""A rank that trains over channels of gloo and over channels of shared memory.

In turns, within the same processes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import pibroch as pb
from pibroch.collectives.transports import TRANSPORT_VARIABLE
from pibroch.config.model import DLRMConfig
from pibroch.models import build_model

NUM_TABLES = 26
NUM_ROWS = 50_000
NUM_DENSE = 13
CONTENDERS = ("auto", "gloo")


class _Training:
    """A DLRM under ``alltoall`` and its summed dense layers, all over one transport."""

    def __init__(self, dim: int, name: str, batches: list[pb.JaggedBatch]) -> None:
        with _transport(name):
            tables = [pb.Table(f"C{i}", NUM_ROWS, dim) for i in range(NUM_TABLES)]
            self.embeddings = pb.Embeddings(tables, pb.RowWiseAdagrad(lr=0.02), "alltoall")
            torch.manual_seed(0)
            config = DLRMConfig(dim=dim, bottom=(64,), top=(64,))
            self.model: nn.Module = pb.data_parallel(build_model(config, NUM_DENSE, NUM_TABLES))
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
            self.losses: list[float] = []
            self.run(batches)

    def run(self, batches: list[pb.JaggedBatch]) -> tuple[float, float]:
        """Train on some batches; wall and CPU seconds of this process."""
        dist.barrier()
        wall = time.perf_counter()
        cpu = time.process_time()
        for batch in self.embeddings.feed(batches):
            loss = binary_cross_entropy_with_logits(
                self.model(batch.dense, partial(self.embeddings, batch)), batch.labels
            )
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())
        dist.barrier()
        return time.perf_counter() - wall, time.process_time() - cpu


@contextmanager
def _transport(name: str) -> Iterator[None]:
    os.environ[TRANSPORT_VARIABLE] = name
    try:
        yield
    finally:
        del os.environ[TRANSPORT_VARIABLE]


def trained(
    rank: int, size: int, dim: int, batch_size: int, rounds: int, steps: int
) -> dict[str, list[tuple[float, float]]]:
    """Wall and CPU seconds of each round of so many steps, by transport.

    Losses are equal bit for bit.

    Args:
        rank: of this process.
        size: number of ranks.
        dim: floats a row.
        batch_size: samples a rank and step.
        rounds: how many.
        steps: in each.
    """
    draw = torch.Generator().manual_seed(rank)
    features = [f"C{i}" for i in range(NUM_TABLES)]
    batches = []
    for _ in range(steps):
        ids = (torch.rand(NUM_TABLES, batch_size, generator=draw) ** 3 * NUM_ROWS).long()
        dense = torch.randn(batch_size, NUM_DENSE, generator=draw)
        labels = (ids[0] % 2).float()
        batches.append(pb.JaggedBatch.from_one_hot(dense, features, ids, labels))
    trainings = {name: _Training(dim, name, batches) for name in CONTENDERS}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in CONTENDERS}
    for number in range(rounds):
        for name in CONTENDERS if number % 2 else reversed(CONTENDERS):
            taken[name].append(trainings[name].run(batches))
    assert trainings["auto"].losses == trainings["gloo"].losses, "losses differ between transports"
    return taken
