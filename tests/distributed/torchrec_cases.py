"""A program in TorchRec's manner on one rank, with batches of its own.

The model is called with such a batch.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import pibroch as pb
from pibroch.metrics import StreamingMetrics
from pibroch.torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)

KEYS = ["user", "item", "seen"]
BAGS = [
    EmbeddingBagConfig(num_embeddings=40, embedding_dim=8, name="users", feature_names=["user"]),
    EmbeddingBagConfig(
        num_embeddings=60, embedding_dim=16, name="items", feature_names=["item", "seen"]
    ),
]
SEQUENCES = [
    EmbeddingConfig(num_embeddings=60, embedding_dim=4, name="places", feature_names=["seen"])
]
OPTIMIZER = pb.Adagrad(lr=0.3)


@dataclass
class Batch:
    dense: torch.Tensor
    ids: KeyedJaggedTensor
    labels: torch.Tensor

    def to(self, device):
        return Batch(self.dense.to(device), self.ids.to(device), self.labels.to(device))


class Model(nn.Module):
    """Holds its collections, as TorchRec's models do."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(1)
        self.bags = EmbeddingBagCollection(tables=BAGS, optimizer=OPTIMIZER, seed=3, **options)
        self.sequences = EmbeddingCollection(
            tables=SEQUENCES, optimizer=OPTIMIZER, seed=3, **options
        )
        self.top = nn.Sequential(nn.Linear(2 + 40 + 12, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, batch):
        seen = self.sequences(batch.ids)["seen"].to_padded_dense(3).flatten(1)
        return self.top(torch.cat([batch.dense, self.bags(batch.ids).values(), seen], 1)).squeeze(1)


def make_batch(size, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(KEYS) * size,), generator=generator)
    ids = torch.randint(0, 40, (int(lengths.sum()),), generator=generator)
    dense = torch.randn(size, 2, generator=generator)
    return Batch(dense, KeyedJaggedTensor(KEYS, ids, lengths=lengths), (dense[:, 0] > 0).float())


def batches_of(rank, sizes):
    return [make_batch(size, 100 * rank + step) for step, size in enumerate(sizes[rank])]


def joined(parts):
    ids = {key: [part.ids[key] for part in parts] for key in KEYS}
    values = torch.cat([part.values() for key in KEYS for part in ids[key]])
    lengths = torch.cat([part.lengths() for key in KEYS for part in ids[key]])
    dense, labels = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("dense", "labels")
    )
    return Batch(dense, KeyedJaggedTensor(KEYS, values, lengths=lengths), labels)


def pieces_of(model):
    return {
        view.piece.table.name: (view.piece.rows, view.weights.copy())
        for each in (model.bags, model.sequences)
        for view in each.pieces()
    }


def train(channel, sizes, copies=False, empty=None, **options):
    """Batches of each step, summed losses, rows, dense parameters, and metrics of all ranks."""
    model = Model(**options)
    step_of = pb.data_parallel(
        model, num_samples=(lambda batch: len(batch.labels)) if copies else None
    )
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    metrics = StreamingMetrics()
    kinds = []
    losses = []
    given = {"empty": lambda batch: make_batch(0, 0)} if empty else {}
    for batch in model.bags.feed(
        batches_of(channel.ranks.rank, sizes), key=lambda batch: batch.ids, **given
    ):
        kinds.append((type(batch).__name__, len(batch.labels), batch.ids.stride()))
        batch = batch.to("cpu") if copies else batch
        logits = step_of(batch)
        loss = binary_cross_entropy_with_logits(logits, batch.labels)
        losses.append(loss.item() * len(batch.labels) if len(batch.labels) else 0.0)
        dense.zero_grad()
        loss.backward()
        dense.step()
        metrics.add(logits, batch.labels)
    parameters = [each.detach().numpy() for each in model.parameters()]
    return kinds, losses, pieces_of(model), parameters, metrics.compute()["label"].lifetime


def train_alone(sizes):
    """The same over the global batches, in one process and with torch alone but for the tables."""
    model = Model(exchange="local")
    losses = []
    metrics = StreamingMetrics(ranks=pb.collectives.Ranks.alone())
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = [batches_of(rank, sizes) for rank in range(len(sizes))]
    for step in range(max(map(len, parts))):
        batch = joined([own[step] for own in parts if step < len(own)])
        logits = model(batch)
        loss = binary_cross_entropy_with_logits(logits, batch.labels)
        losses.append(loss.item() * len(batch.labels))
        dense.zero_grad()
        loss.backward()
        dense.step()
        metrics.add(logits, batch.labels)
    return (
        losses,
        pieces_of(model),
        [each.detach().numpy() for each in model.parameters()],
        metrics.compute(),
    )
