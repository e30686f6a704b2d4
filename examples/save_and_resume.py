"""A program that may be killed at any moment, and goes on, on any number of ranks.

Run: torchrun --nproc-per-node 2 examples/save_and_resume.py runs/mine 60; kill it; run it again,
with any number of processes.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import pibroch as pb

folder = sys.argv[1]
last = int(sys.argv[2])
if "RANK" in os.environ:
    dist.init_process_group("gloo")
rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
tables = [
    pb.Table("user", 1000, 16),
    pb.Table("item", 500, 8),
    pb.Table("seen", 500, 8, pooling="none"),
]
embeddings = pb.Embeddings(
    tables, {"": pb.RowWiseAdagrad(lr=0.1), "item": pb.Adam(lr=0.01)}, exchange="auto"
)
torch.manual_seed(0)
model = pb.data_parallel(nn.Sequential(nn.Linear(16 + 8 + 8, 32), nn.ReLU(), nn.Linear(32, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)


def batch_of(step):
    """This rank's part of the global batch of 64 samples of a step."""
    ids = torch.randint(500, (3, 64), generator=torch.Generator().manual_seed(step))[
        :, 64 * rank // size :
    ]
    ids = ids[:, : 64 * (rank + 1) // size - 64 * rank // size]
    return pb.JaggedBatch.from_one_hot(
        torch.zeros(ids.shape[1], 0), ["user", "item", "seen"], ids, ids[0] % 2.0
    )


parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
saved = pb.load(folder, embeddings, **parts, missing_ok=True)
print(f"rank {rank} of {size} begins after step {saved.step}")
for step in range(saved.step + 1, last + 1):
    batch = batch_of(step)
    out = embeddings(batch)
    logits = model(torch.cat([out["user"], out["item"], out["seen"].padded(1).flatten(1)], 1))
    loss = nn.functional.binary_cross_entropy_with_logits(logits.squeeze(1), batch.labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 20 == 0 or step == last:
        pb.save(folder, embeddings, **parts, extra={"loss": loss.item()})
print(f"rank {rank}: loss {loss.item():.4f} in step {last}; guessing gives 0.6931")
