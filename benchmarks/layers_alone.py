"""How fast the layers of a trained model are where embeddings cost nothing."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from pibroch.data import EncodedDataset, Loader
from pibroch.serve.from_checkpoint import open_checkpoint

WARM_STEPS = 3
STEPS = 20


def layers_alone(dataset: EncodedDataset, run: Path, batch_size: int) -> float:
    """Samples a second of forward and backward over embeddings that lie in memory.

    Without lookup, update, optimizer and reading: no program that computes these layers by torch is
    faster. The quickest of some steps counts. Gradients of sequences' rows are left out.
    """
    opened = open_checkpoint(run)
    layers = opened.dense
    batch = next(iter(Loader(dataset.split("test"), batch_size)))
    assert batch.labels is not None, "of an encoded dataset"
    with torch.no_grad():
        rows = opened.lookup(batch)
    if isinstance(rows, Tensor):
        rows.requires_grad_()
    layers.train().requires_grad_(True)
    shortest = float("inf")
    for step in range(WARM_STEPS + STEPS):
        begin = time.perf_counter()
        binary_cross_entropy_with_logits(layers(batch.dense, lambda: rows), batch.labels).backward()
        if step >= WARM_STEPS:
            shortest = min(shortest, time.perf_counter() - begin)
        for tensor in (rows, *layers.parameters()):
            if isinstance(tensor, Tensor):
                tensor.grad = None
    return batch_size / shortest
