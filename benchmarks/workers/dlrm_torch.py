"""DLRM in plain torch: one ``nn.EmbeddingBag(sparse=True)`` a table.

Sparse gradients go into ``torch.optim``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.cases import Case, initial_table
from benchmarks.workers.dlrm import PlainDense, TrainingSubject, torch_batches


def build(case: Case) -> TrainingSubject:
    """The contender for one case.

    Raises:
        ValueError: for an optimizer that torch does not have.
    """
    ids_NFB, dense_NBn, labels_NB = torch_batches(case)
    bags = [
        nn.EmbeddingBag(
            case.num_rows,
            case.dim,
            mode="sum",
            sparse=True,
            _weight=torch.from_numpy(initial_table(case, t)),
        )
        for t in range(case.num_tables)
    ]
    model = PlainDense(case)
    sparse = sparse_optimizer([weight for bag in bags for weight in bag.parameters()], case)
    dense = torch.optim.SGD(model.parameters(), lr=case.dense_lr)
    offsets = torch.arange(case.batch_size)

    def embed(batch: int) -> Tensor:
        return torch.stack(
            [bag(ids, offsets) for bag, ids in zip(bags, ids_NFB[batch], strict=True)], 1
        )

    def step(batch: int) -> Tensor:
        sparse.zero_grad()
        dense.zero_grad()
        loss = binary_cross_entropy_with_logits(
            model(dense_NBn[batch], embed(batch)), labels_NB[batch]
        )
        loss.backward()
        dense.step()
        sparse.step()
        return loss.detach()

    return TrainingSubject(step, embed, {"torch": torch.__version__}, len(ids_NFB))


def sparse_optimizer(weights: list[nn.Parameter], case: Case) -> torch.optim.Optimizer:
    """Torch's optimizer for sparse gradients that the case asks for."""
    if case.sparse_optimizer == "sgd":
        return torch.optim.SGD(weights, lr=case.sparse_lr)
    if case.sparse_optimizer == "adagrad":
        return torch.optim.Adagrad(weights, lr=case.sparse_lr, eps=case.eps)
    if case.sparse_optimizer == "adam":
        return torch.optim.SparseAdam(weights, lr=case.sparse_lr, eps=case.eps)
    raise ValueError(f"torch has no {case.sparse_optimizer} for sparse gradients")
