"""The step that every exchange must reproduce: dense float64 tables, torch's autograd, no kernel of ours."""

from __future__ import annotations

import numpy as np
import torch

from pibroch.embedding import SGD, Adagrad, Adam, RowWiseAdagrad, RowWiseAdam
from pibroch.kernels.scatter_update import naive

NAIVE = {SGD: naive.sgd, Adagrad: naive.adagrad, RowWiseAdagrad: naive.row_wise_adagrad}
NAIVE |= {Adam: naive.adam, RowWiseAdam: naive.row_wise_adam}


class Reference:
    """Records of all tables as float64; starts from the records of the exchange under test."""

    def __init__(self, embeddings):
        self.space, self.optimizer = embeddings.row_space, embeddings.groups[0].optimizer
        self.records = embeddings.shard.records.astype(np.float64)
        self.steps = 0

    def step(self, batch, loss_of):
        """One step on the batch; returns the pooled embeddings [B, F, D] before it."""
        self.steps += 1
        weights = torch.tensor(self.records[:, : self.space.dim], requires_grad=True)
        pooled, touched = self._pool(weights, batch)
        loss_of(pooled).backward()
        hyper = self.optimizer.hyper(self.optimizer.lr, self.steps)
        for row in sorted(touched):
            gradient = weights.grad[row].numpy() if weights.grad is not None else np.zeros(self.space.dim)
            NAIVE[type(self.optimizer)](self.records[row], gradient, hyper)
        return pooled.detach()

    def _pool(self, weights, batch):
        size, touched, features = batch.batch_size, set(), []
        for f, key in enumerate(self.space.features):
            place, bags = batch.keys.index(key), []
            for b in range(size):
                begin, end = batch.offsets[place * size + b], batch.offsets[place * size + b + 1]
                rows = batch.values[begin:end] + int(self.space.first_row_of_feature[f])
                touched |= set(rows.tolist())
                scale = torch.ones(len(rows), dtype=torch.float64)
                scale = scale if batch.weights is None else batch.weights[begin:end].double()
                total = (weights[rows] * scale[:, None]).sum(0)
                bags.append(total / max(len(rows), 1) if self.space.mean_of_feature[f] else total)
            features.append(torch.stack(bags) if bags else weights[:0])
        return torch.stack(features, 1), touched
