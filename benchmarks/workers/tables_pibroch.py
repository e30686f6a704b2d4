"""A rank of topic ``tables`` on pibroch: tables of many widths, or sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

import pibroch as pb
from benchmarks.cases import Case
from benchmarks.workers import pibroch_tables as ours
from benchmarks.workers import tables_heads as heads
from benchmarks.workers.ranks import RankSubject, in_order, join, rank_batches


def build(case: Case) -> RankSubject:
    """Tables of the case's width, or of many where it has none."""
    join(case)
    tables = [
        pb.Table(f"C{t}", case.num_rows, heads.width_of(case, t), initializer=pb.Zeros())
        for t in range(case.num_tables)
    ]
    batches = ours.jagged_batches(*rank_batches(case))
    width = sum(table.dim for table in tables)
    weights = heads.head(case, width)

    def loss_of(embeddings: pb.Embeddings, batch: pb.JaggedBatch) -> Tensor:
        out = embeddings(batch)
        pooled = out.flatten(1) if isinstance(out, Tensor) else out.cat()
        return heads.loss_of_pooled(pooled, weights, batch.labels)

    return _subject(case, tables, batches, loss_of)


def build_sequences(case: Case) -> RankSubject:
    """One table, read id by id."""
    join(case)
    table = pb.Table("C0", case.num_rows, case.dim, initializer=pb.Zeros(), pooling="none")
    ids_NFB, _, labels_NB = rank_batches(case)
    size = ids_NFB.shape[2]
    length = ids_NFB.shape[1]
    offsets = torch.arange(0, size * length + 1, length)
    batches = [
        pb.JaggedBatch(torch.zeros(size, 0), ("C0",), values, offsets, labels)
        for values, labels in zip(heads.sequences(ids_NFB), labels_NB, strict=True)
    ]
    weights = heads.head(case, case.dim)

    def loss_of(embeddings: pb.Embeddings, batch: pb.JaggedBatch) -> Tensor:
        return heads.loss_of_sequences(embeddings(batch)["C0"].values, weights, batch.labels)

    return _subject(case, [table], batches, loss_of)


def _subject(
    case: Case,
    tables: list[pb.Table],
    batches: list[pb.JaggedBatch],
    loss_of: Callable[[pb.Embeddings, pb.JaggedBatch], Tensor],
) -> RankSubject:
    options = dict(case.exchange_options)
    if "plan" in options:
        options["placement"] = pb.Plan.load(Path(options.pop("plan")))
    embeddings = pb.Embeddings(
        tables, ours.sparse_optimizer(case), options.pop("exchange", "auto"), **options
    )
    for number, table in enumerate(tables):
        embeddings.load_weights(table.name, heads.weights_of(case, number))

    def losses() -> Iterator[Tensor]:
        for batch in embeddings.feed(in_order(batches)):
            loss = loss_of(embeddings, batch)
            loss.backward()
            yield loss.detach()

    return RankSubject(losses(), ours.versions())
