"""DLRM with TorchRec's own model, its tables and ranks pibroch's."""

import shared
import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.models.dlrm import DLRM, DLRMTrain

import pibroch as pb
from pibroch.torchrec import EmbeddingBagCollection

FEATURES = {"user": 50, "item": 80, "shop": 20}


def batches(rank, world):
    for step in range(shared.STEPS):
        dense, lengths, ids, labels = shared.draw(step, rank, world, FEATURES)
        yield Batch(dense, KeyedJaggedTensor(list(FEATURES), ids, lengths=lengths), labels)


def run(rank, world):
    configs = [
        EmbeddingBagConfig(
            name=f"t_{name}", embedding_dim=16, num_embeddings=rows, feature_names=[name]
        )
        for name, rows in FEATURES.items()
    ]
    tables = EmbeddingBagCollection(tables=configs, optimizer=pb.RowWiseAdagrad(lr=0.1, eps=1e-8))
    model = DLRMTrain(DLRM(tables, 4, [32, 16], [32, 1]))
    state = shared.initial("dlrm", model)
    model = pb.data_parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.load_state_dict(state)
    losses = []
    for batch in tables.feed(batches(rank, world), key=lambda batch: batch.sparse_features):
        loss, _ = model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    shared.save("dlrm", losses)
