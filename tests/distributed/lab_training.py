"""A few steps of a small DLRM on ``alltoall``; prints a hash of all numbers that this rank holds.

Run once per rank.
"""

import hashlib
import os
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits

import pibroch as pb
from pibroch.collectives import data_parallel
from pibroch.config.model import DLRMConfig
from pibroch.models import DLRM

NUM_STEPS = 6
SIZES = (300, 40, 1000)
PLACEMENT = {"": "row_wise", "C0": "table_wise", "C1": "replicated"}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)  # all ranks get rank 0's dense weights
    tables = [pb.Table(f"C{place}", num_rows, 8) for place, num_rows in enumerate(SIZES)]
    embeddings = pb.Embeddings(
        tables, optimizer=pb.Adagrad(lr=0.1), exchange="alltoall", placement=PLACEMENT
    )
    model = data_parallel(DLRM(4, len(tables), DLRMConfig(dim=8, bottom=(16,), top=(16,))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in embeddings.feed(make_batch(rank, step) for step in range(NUM_STEPS)):
        optimizer.zero_grad()
        logits = model(batch.dense, partial(embeddings, batch))
        binary_cross_entropy_with_logits(logits, batch.labels).backward()
        optimizer.step()
    print(
        f"hash {fingerprint(embeddings, model)} of rank {rank} at {os.environ['MASTER_ADDR']}",
        flush=True,
    )
    dist.barrier()
    dist.destroy_process_group()


def make_batch(rank: int, step: int) -> pb.JaggedBatch:
    """Another size on each rank and in each step."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    size = 20 + 7 * rank + step
    ids = torch.stack(
        [
            torch.randint(num_rows, (size,), generator=generator) ** 2 // num_rows
            for num_rows in SIZES
        ]
    )
    labels = (torch.rand(size, generator=generator) < 0.3).float()
    return pb.JaggedBatch.from_one_hot(
        torch.rand(size, 4, generator=generator), ["C0", "C1", "C2"], ids, labels
    )


def fingerprint(embeddings: pb.Embeddings, model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for view in embeddings.pieces():
        for array in (view.weights, *view.state.values()):
            digest.update(np.asarray(array).tobytes())
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
