"""Two towers with TorchRec: one for users, one for items.

two_tower_pibroch.py is the same program, moved.
"""

import shared
import torch
import torchrec_ranks
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    KeyedTensor,
    PoolingType,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

FEATURES = {"user": 50, "seen": 90, "item": 90, "maker": 30}


class TwoTower(nn.Module):
    def __init__(self, tables):
        super().__init__()
        self.tables = tables
        self.query = nn.Sequential(nn.Linear(128 + 64 + 4, 32), nn.ReLU(), nn.Linear(32, 16))
        self.offer = nn.Sequential(nn.Linear(64 + 8, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, dense, features):
        pooled = self.tables(features)
        query, offer = KeyedTensor.regroup([pooled], [["user", "seen"], ["item", "maker"]])
        return (self.query(torch.cat([query, dense], 1)) * self.offer(offer)).sum(1)


def batches(rank, world):
    for step in range(shared.STEPS):
        dense, lengths, ids, labels = shared.draw(step, rank, world, FEATURES)
        yield dense, KeyedJaggedTensor(list(FEATURES), ids, lengths=lengths), labels


def run(rank, world):
    mean = PoolingType.MEAN
    configs = [
        EmbeddingBagConfig(
            name="t_user", embedding_dim=128, num_embeddings=50, feature_names=["user"]
        ),
        EmbeddingBagConfig(
            name="t_item",
            embedding_dim=64,
            num_embeddings=90,
            feature_names=["seen", "item"],
            pooling=mean,
        ),
        EmbeddingBagConfig(
            name="t_maker", embedding_dim=8, num_embeddings=30, feature_names=["maker"]
        ),
    ]
    tables = EmbeddingBagCollection(tables=configs)
    model = TwoTower(tables)
    state = shared.initial("two_tower", model)
    apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": 0.2})
    model = torchrec_ranks.shard(model, [config.name for config in configs])
    optimizer = torchrec_ranks.dense_optimizer(
        model, lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    )
    model.load_state_dict(state)
    losses = []
    for dense, features, labels in batches(rank, world):
        loss = nn.functional.binary_cross_entropy_with_logits(model(dense, features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    shared.save("two_tower", losses)
