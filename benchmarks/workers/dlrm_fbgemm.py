"""DLRM on FBGEMM's table-batched embeddings directly, plain torch around them.

The leanest use of the peer.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.cases import Case
from benchmarks.workers import fbgemm
from benchmarks.workers.dlrm import PlainDense, TrainingSubject, torch_batches


def build(case: Case) -> TrainingSubject:
    """The contender for one case."""
    ids_NFB, dense_NBn, labels_NB = torch_batches(case)
    tables = fbgemm.table_batched_embeddings(case)
    model = PlainDense(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=case.dense_lr)
    offsets = torch.arange(case.num_tables * case.batch_size + 1)

    def embed(batch: int) -> Tensor:
        return tables(ids_NFB[batch].reshape(-1), offsets).view(-1, case.num_tables, case.dim)

    def step(batch: int) -> Tensor:
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(
            model(dense_NBn[batch], embed(batch)), labels_NB[batch]
        )
        loss.backward()
        optimizer.step()
        return loss.detach()

    return TrainingSubject(step, embed, fbgemm.versions(), len(ids_NFB))
