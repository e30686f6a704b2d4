"""Compare the compiled kernels with their plain definitions.

One lookup, and one update by each optimizer.
"""

from __future__ import annotations

import numpy as np
import torch

from pibroch.config.optimizer import SPARSE_OPTIMIZERS
from pibroch.data import JaggedBatch
from pibroch.embedding import SparseOptimizer, Table
from pibroch.exchange import Embeddings
from pibroch.kernels.scatter_update import definition_of


def largest_kernel_error() -> float:
    """The largest difference over the house's optimizers, on rows that occur several times.

    Relative for numbers above 1.
    """
    specs = SPARSE_OPTIMIZERS.built_in.values()
    return max(_error_of(spec.build(lr=0.05, weight_decay=0.01)) for spec in specs)


def _error_of(
    optimizer: SparseOptimizer, num_rows: int = 50, dim: int = 16, num_samples: int = 200
) -> float:
    random = np.random.default_rng(0)
    embeddings = Embeddings([Table("table", num_rows, dim)], optimizer)
    ids = random.integers(0, num_rows, num_samples)
    gradients = random.standard_normal((num_samples, dim)).astype(np.float32)
    expected = embeddings.shard.records.astype(np.float64)
    batch = JaggedBatch.from_one_hot(
        torch.zeros(num_samples, 0),
        ["table"],
        torch.from_numpy(ids)[None],
        torch.zeros(num_samples),
    )
    pooled_BFD = embeddings(batch)
    lookup_error = np.abs(pooled_BFD.detach().numpy()[:, 0] - expected[ids, :dim]).max()
    pooled_BFD.backward(torch.from_numpy(gradients)[:, None])
    hyper = optimizer.hyper(optimizer.lr, 1)
    update = definition_of(optimizer.kernel)
    for row in np.unique(ids):
        update(expected[row], gradients[ids == row].astype(np.float64).sum(0), hyper)
    update_error = np.abs(embeddings.shard.records - expected) / (1 + np.abs(expected))
    return float(max(lookup_error, update_error.max()))
