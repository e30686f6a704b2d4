"""A rank of a model on pibroch's exchanges between ranks, as a user trains it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, islice, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import pibroch as pb
from benchmarks.cases import Arrays, Case, initial_table
from benchmarks.workers import pibroch_tables as ours
from benchmarks.workers.dlrm_pibroch import dense_model
from benchmarks.workers.parts import Parts
from benchmarks.workers.ranks import RankSubject, batch_order, in_order, join, rank_batches
from pibroch.collectives import data_parallel
from pibroch.data import Loader, Split
from pibroch.exchange.base import Exchange
from pibroch.exchange.lookahead.exchange import LookaheadExchange


def build(case: Case) -> RankSubject:
    """This rank's share of ``alltoall``."""
    return build_on(case, "alltoall")


def build_retrieve(case: Case) -> RankSubject:
    """This rank's share of ``retrieve``."""
    return build_on(case, "retrieve")


def build_lookahead(case: Case) -> RankSubject:
    """This rank's share of ``lookahead``."""
    return build_on(case, "lookahead")


def build_towers(case: Case) -> RankSubject:
    """This rank's share of ``towers``, of whole tables and without modules."""
    return build_on(case, "towers")


def build_hashed(case: Case) -> RankSubject:
    """This rank's share of ``alltoall`` over tables of raw ids."""
    return build_on(case, "alltoall", are_hashed=True)


def build_lookahead_hashed(case: Case) -> RankSubject:
    """This rank's share of ``lookahead`` over tables of raw ids."""
    return build_on(case, "lookahead", are_hashed=True)


def build_on(case: Case, exchange: str, are_hashed: bool = False) -> RankSubject:
    """This rank's share of one exchange."""
    join(case)
    optimizer = ours.sparse_optimizer(case)
    embeddings = pb.Embeddings(
        ours.tables(case, are_hashed),
        optimizer=optimizer,
        exchange=exchange,
        **case.exchange_options,
    )
    if not are_hashed:
        load_pieces(embeddings, case)
    parts = ours.parts(case)
    if "assign" in case.exchange_options:
        batches = loaded_batches(case, embeddings)
    else:
        batches = in_order(ours.jagged_batches(*rank_batches(case)))
    losses = train(data_parallel(dense_model(case)), embeddings, batches, case, parts)
    return RankSubject(losses, ours.versions(), partial(counts, embeddings.exchange), parts)


def counts(exchange: Exchange[Any]) -> dict[str, float]:
    """Of ``lookahead``: bytes sent by purpose, rows read and fetched, slots in use now."""
    if not isinstance(exchange, LookaheadExchange):
        return {}
    done = exchange.report()
    slots = exchange.num_cached
    sent: dict[str, float] = {
        f"sent {purpose}": count for purpose, count in done.bytes_by_purpose.items()
    }
    return sent | {"rows read": done.rows_read, "rows fetched": done.rows_fetched, "slots": slots}


def train(
    model: nn.Module,
    embeddings: pb.Embeddings,
    batches: Iterable[pb.JaggedBatch],
    case: Case,
    parts: Parts,
) -> Iterator[Tensor]:
    """Train a batch a turn; yields its loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=case.dense_lr)

    def look_up(batch: pb.JaggedBatch) -> Tensor:
        with parts.part("lookup"):
            pooled: Tensor = embeddings(batch)
            parts.in_backward("update", pooled)
        return pooled

    for batch in parts.each("read", embeddings.feed(batches)):
        optimizer.zero_grad()
        with parts.part("forward"):
            loss = binary_cross_entropy_with_logits(
                model(batch.dense, partial(look_up, batch)), batch.labels
            )
        with parts.part("backward"):
            loss.backward()
        with parts.part("dense optimizer"):
            optimizer.step()
        yield loss.detach()


def loaded_batches(case: Case, embeddings: pb.Embeddings) -> Iterator[pb.JaggedBatch]:
    """This rank's samples in the order of :func:`batch_order`, from loaders over all of them.

    Given and assigned samples are read alike.
    """
    arrays = Arrays.load(case.data)
    num_batches = len(arrays)
    world_size = embeddings.ranks.world_size
    order = list(islice(batch_order(num_batches), 2 * num_batches))
    loaders = []
    for numbers in (order[:num_batches], order[num_batches:]):
        ids_NBF = np.ascontiguousarray(arrays.ids[numbers].transpose(0, 2, 1))
        split = Split(
            "train",
            tuple(f"C{table}" for table in range(case.num_tables)),
            (),
            arrays.labels[numbers].reshape(-1),
            arrays.dense[numbers].reshape(-1, arrays.dense.shape[-1]),
            ids_NBF.reshape(-1, case.num_tables).astype(np.int32),
            {},
        )
        part = embeddings.ranks.rank, world_size
        loaders.append(embeddings.assign(Loader(split, case.batch_size * world_size, part=part)))
    first, later = loaders
    return chain(first, chain.from_iterable(repeat(later)))


def load_pieces(embeddings: pb.Embeddings, case: Case) -> None:
    """Copy the case's starting weights into the parts of the tables that this rank holds."""
    for view in embeddings.pieces():
        rows = view.piece.rows
        columns = view.piece.columns
        table = initial_table(case, int(view.piece.table.name[1:]))
        assert isinstance(rows, range), (
            "each exchange of this topic gives pieces whose rows are evenly spaced"
        )
        view.weights[:] = table[rows.start : rows.stop : rows.step, columns.start : columns.stop]
