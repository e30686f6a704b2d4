"""A rank of the dense model alone.

Embeddings are there already, dense gradients are summed over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.cases import Case
from benchmarks.workers.dlrm import PlainDense
from benchmarks.workers.parts import NO_PARTS, Parts
from benchmarks.workers.ranks import RankSubject, batch_order, join, rank_batches


def build_plain(case: Case) -> RankSubject:
    """Plain torch under DistributedDataParallel."""
    join(case)
    model = nn.parallel.DistributedDataParallel(PlainDense(case))
    return RankSubject(train(model, rank_batches(case), case), {"torch": torch.__version__})


def train(
    model: nn.Module, batches: tuple[Tensor, Tensor, Tensor], case: Case, parts: Parts = NO_PARTS
) -> Iterator[Tensor]:
    """Train a batch a turn on embeddings that never change but whose gradients are computed.

    Yields its loss.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=case.dense_lr)
    _, dense_NBn, labels_NB = batches
    generator = torch.Generator().manual_seed(case.seed)
    embedded_BFD = (
        torch.rand(case.batch_size, case.num_tables, case.dim, generator=generator)
        .sub_(0.5)
        .mul_(0.5)
    )
    embedded_BFD.requires_grad_()
    for batch in batch_order(len(dense_NBn)):
        optimizer.zero_grad()
        embedded_BFD.grad = None
        with parts.part("forward"):
            loss = binary_cross_entropy_with_logits(
                model(dense_NBn[batch], embedded_BFD), labels_NB[batch]
            )
        with parts.part("backward"):
            loss.backward()
        with parts.part("dense optimizer"):
            optimizer.step()
        yield loss.detach()
