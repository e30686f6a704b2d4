"""DLRM with TorchRec's own model. dlrm_pibroch.py is the same program, moved."""

import shared
import torch
import torchrec_ranks
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

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
    tables = EmbeddingBagCollection(tables=configs)
    model = DLRMTrain(DLRM(tables, 4, [32, 16], [32, 1]))
    state = shared.initial("dlrm", model)
    apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.1, "eps": 1e-8})
    model = torchrec_ranks.shard(model, [config.name for config in configs])
    optimizer = torchrec_ranks.dense_optimizer(
        model, lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    )
    model.load_state_dict(state)
    losses = []
    for batch in batches(rank, world):
        loss, _ = model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    shared.save("dlrm", losses)
