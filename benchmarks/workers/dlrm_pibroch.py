"""DLRM on pibroch: its ``Embeddings`` and its model, as a user trains them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

import pibroch as pb
from benchmarks.cases import BOTTOM_HIDDEN, BOTTOM_STREAM, TOP_SIZES, TOP_STREAM, Case
from benchmarks.workers import pibroch_tables as ours
from benchmarks.workers.dlrm import TrainingSubject, linears, load_linears, torch_batches
from pibroch.config.model import DLRMConfig
from pibroch.models import DLRM, build_model
from pibroch.models.base import Model
from pibroch.models.build import MODELS


def build(case: Case) -> TrainingSubject:
    """The contender for one case."""
    return _subject(case, False)


def build_hashed(case: Case) -> TrainingSubject:
    """The same by tables of raw ids, of as many rows."""
    return _subject(case, True)


def build_rows(case: Case) -> TrainingSubject:
    """Lookups and updates alone, without a model."""
    return _rows_alone(case, False)


def build_hashed_rows(case: Case) -> TrainingSubject:
    """The same by tables of raw ids."""
    return _rows_alone(case, True)


def _embeddings(case: Case, are_hashed: bool) -> pb.Embeddings:
    embeddings = pb.Embeddings(
        ours.tables(case, are_hashed), optimizer=ours.sparse_optimizer(case), exchange="local"
    )
    if not are_hashed:
        ours.load_tables(embeddings.shard, case)
    return embeddings


def _rows_alone(case: Case, are_hashed: bool) -> TrainingSubject:
    batches = ours.jagged_batches(*torch_batches(case))
    embeddings = _embeddings(case, are_hashed)
    gradient = torch.randn(
        case.batch_size, case.num_tables, case.dim, generator=torch.Generator().manual_seed(1)
    )

    def step(batch: int) -> Tensor:
        out: Tensor = embeddings(batches[batch])
        out.backward(gradient)
        return out.detach().mean()

    return TrainingSubject(
        step, lambda batch: embeddings(batches[batch]), ours.versions(), len(batches)
    )


def _subject(case: Case, are_hashed: bool) -> TrainingSubject:
    batches = ours.jagged_batches(*torch_batches(case))
    embeddings = _embeddings(case, are_hashed)
    model = dense_model(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=case.dense_lr)

    def step(batch: int) -> Tensor:
        optimizer.zero_grad()
        data = batches[batch]
        loss = binary_cross_entropy_with_logits(model(data.dense, embeddings(data)), data.labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return TrainingSubject(
        step, lambda batch: embeddings(batches[batch]), ours.versions(), len(batches)
    )


def dense_model(case: Case) -> Model:
    """The case's model; a DLRM gets the case's starting weights and its order of pairs."""
    if case.model != "dlrm":
        torch.manual_seed(case.seed)
        dim = case.dim - MODELS[case.model].table_dim(0)
        return build_model(case.model, case.num_dense, case.num_tables, dim=dim, top=TOP_SIZES[:-1])
    model = DLRM(
        case.num_dense,
        case.num_tables,
        DLRMConfig(dim=case.dim, bottom=BOTTOM_HIDDEN, top=TOP_SIZES[:-1]),
    )
    assert model.bottom is not None
    load_linears(linears(model.bottom), case, BOTTOM_STREAM)
    load_linears(linears(model.top), case, TOP_STREAM)
    return model
