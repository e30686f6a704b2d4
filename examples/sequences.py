"""Tables of several widths, one of them read id by id.

A small attention model over what a user has clicked (as DIN, KDD'18).

python examples/sequences.py, or on several ranks: torchrun --standalone --nproc-per-node 2
examples/sequences.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pibroch as pb

NUM_ITEMS = 200
NUM_USERS = 50
LENGTH = 12
BATCH = 256


class Attention(nn.Module):
    """How much each past click counts for the candidate, then a small network."""

    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Sequential(nn.Linear(16 + 16 + 4 + 1, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, out: pb.EmbeddingOutput) -> Tensor:
        """Logits ``[B]``."""
        clicked = out["clicked"]
        candidate = out["candidate@item"]
        past_BTD = clicked.padded(LENGTH)
        is_there_BT = clicked.mask(LENGTH)
        scores = (past_BTD @ candidate[:, :, None]).squeeze(2).masked_fill(~is_there_BT, -1e9)
        interest = (scores.softmax(1) * is_there_BT)[:, None] @ past_BTD
        wide = out["candidate@item_bias"]
        return self.top(torch.cat([interest.squeeze(1), candidate, out["user"], wide], 1)).squeeze(
            1
        )


def draw_batch(generator: torch.Generator) -> pb.JaggedBatch:
    """Users click items of their own kind.

    The candidate is clicked if its kind is that of most past clicks.
    """
    lengths = torch.randint(1, LENGTH + 1, (BATCH,), generator=generator)
    kind = torch.randint(0, 4, (BATCH,), generator=generator)
    clicked = torch.repeat_interleave(kind, lengths) + 4 * torch.randint(
        0, NUM_ITEMS // 4, (int(lengths.sum()),), generator=generator
    )
    candidate = torch.randint(0, NUM_ITEMS, (BATCH,), generator=generator)
    user = torch.randint(0, NUM_USERS, (BATCH,), generator=generator)
    ones = torch.ones(BATCH, dtype=torch.int64)
    offsets = torch.cat(
        [torch.zeros(1, dtype=torch.int64), torch.cat([lengths, ones, ones]).cumsum(0)]
    )
    values = torch.cat([clicked, candidate, user])
    labels = (candidate % 4 == kind).float()
    return pb.JaggedBatch(
        torch.zeros(BATCH, 0), ("clicked", "candidate", "user"), values, offsets, labels
    )


def main() -> None:
    """Train it."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = int(os.environ.get("RANK", 0))
    tables = [
        pb.Table("item", NUM_ITEMS, 16, features=("candidate",)),
        pb.Table("history", NUM_ITEMS, 16, features=("clicked",), pooling="none"),
        pb.Table("user", NUM_USERS, 4),
        pb.Table("item_bias", NUM_ITEMS, 1, features=("candidate",)),
    ]
    optimizers = {
        "": pb.Adagrad(lr=0.1),
        "item_bias": pb.SGD(lr=0.05, weight_decay=1e-4, decoupled=True),
    }
    embeddings = pb.Embeddings(
        tables, optimizers, exchange="lookahead" if "RANK" in os.environ else "local"
    )
    torch.manual_seed(0)
    model = pb.data_parallel(Attention()) if "RANK" in os.environ else Attention()
    dense = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(embeddings.fused_optimizer, step_size=100, gamma=0.5)
    generator = torch.Generator().manual_seed(rank)
    for batch in embeddings.feed(draw_batch(generator) for _ in range(300)):
        loss = nn.functional.binary_cross_entropy_with_logits(
            model(embeddings(batch)), batch.labels
        )
        dense.zero_grad()
        loss.backward()
        dense.step()
        embeddings.fused_optimizer.step()
        schedule.step()
    print(f"rank {rank}: log loss {loss.item():.3f}; the share of clicks alone would give 0.562")
    if "RANK" in os.environ:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
