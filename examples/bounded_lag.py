"""Inference between ranks that need not keep step.

Delays that strike now this rank and now that one are hidden.

Run: torchrun --nproc-per-node 2 examples/bounded_lag.py
"""

import random
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

import pibroch as pb
from pibroch.config.model import DLRMConfig
from pibroch.models import build_model

NUM_BATCHES = 50
BATCH_SIZE = 64
NUM_DENSE = 4
FEATURES = ("user", "item", "page")


def batches(rank: int) -> Iterator[pb.JaggedBatch]:
    """This rank's own requests; some of them are late."""
    ids = torch.Generator().manual_seed(rank)
    delays = random.Random(rank)
    for _ in range(NUM_BATCHES):
        time.sleep(delays.choice([0.0, 0.0, 0.0, 0.01]))
        values = torch.randint(1000, (len(FEATURES), BATCH_SIZE), generator=ids)
        dense = torch.rand(BATCH_SIZE, NUM_DENSE, generator=ids)
        yield pb.JaggedBatch.from_one_hot(dense, FEATURES, values, torch.zeros(BATCH_SIZE))


def main() -> None:
    dist.init_process_group("gloo")  # or "bls"
    torch.manual_seed(0)
    tables = [pb.Table(name, num_rows=1000, dim=16) for name in FEATURES]
    embeddings = pb.Embeddings(tables, pb.SGD(lr=1.0), exchange="alltoall").eval()
    model = build_model(DLRMConfig(dim=16), NUM_DENSE, len(FEATURES)).eval()
    for bound in (0, 0, 4):  # the first run compiles kernels
        pipeline = pb.BoundedLagPipeline(model, embeddings, bound)
        start = time.perf_counter()
        total = 0.0
        for prediction in pipeline.run(
            batches(dist.get_rank())
        ):  # in the order of the batches, whatever the bound
            total += prediction.scores().sum().item()
        seconds = time.perf_counter() - start
        print(
            f"rank {dist.get_rank()}: k = {bound}, sum of scores {total:.4f},"
            f" {NUM_BATCHES / seconds:.0f} batches/s"
        )
        dist.barrier()
        pipeline.close()


if __name__ == "__main__":
    main()
