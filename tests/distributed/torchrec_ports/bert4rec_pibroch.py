"""A model of BERT4Rec's kind: which item came last?"""

import shared
import torch
from torch import nn

import pibroch as pb
from pibroch.torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

FEATURES = {"history": 60}
LENGTH = 5
DIM = 32


class BERT4Rec(nn.Module):
    def __init__(self, tables):
        super().__init__()
        self.tables = tables
        self.positions = nn.Parameter(torch.randn(LENGTH, DIM) * 0.1)
        layer = nn.TransformerEncoderLayer(DIM, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(DIM, FEATURES["history"])

    def forward(self, features):
        history = self.tables(features)["history"]
        padding = torch.arange(LENGTH) >= history.lengths()[:, None]
        encoded = self.encoder(
            history.to_padded_dense(LENGTH) + self.positions, src_key_padding_mask=padding
        )
        return self.out(encoded.mean(1))


def batches(rank, world):
    for step in range(shared.STEPS):
        _, lengths, ids, labels = shared.draw(step, rank, world, FEATURES, most=LENGTH)
        last = ids[lengths.cumsum(0) - 1]
        yield (
            KeyedJaggedTensor(list(FEATURES), ids, lengths=lengths),
            (last + labels.long()) % FEATURES["history"],
        )


def run(rank, world):
    configs = [
        EmbeddingConfig(
            name="t_item", embedding_dim=DIM, num_embeddings=60, feature_names=["history"]
        )
    ]
    tables = EmbeddingCollection(tables=configs, optimizer=pb.Adagrad(lr=0.05, eps=1e-8))
    model = BERT4Rec(tables)
    state = shared.initial("bert4rec", model)
    model = pb.data_parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model.load_state_dict(state)
    losses = []
    for features, labels in tables.feed(batches(rank, world), key=lambda batch: batch[0]):
        loss = nn.functional.cross_entropy(model(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    shared.save("bert4rec", losses)
