"""A rank that looks rows up, or trains, under the plans of topic ``retrieve``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import pibroch as pb
from benchmarks.cases import Case, initial_table
from benchmarks.workers import pibroch_tables as ours
from benchmarks.workers.distributed_pibroch import train
from benchmarks.workers.dlrm_pibroch import dense_model
from benchmarks.workers.ranks import RankSubject, in_order, join, rank_batches
from pibroch.collectives import Ranks, data_parallel
from pibroch.embedding.row_set import ids_of
from pibroch.planner import Plan

STEPS_OF_A_MOVE = 200
"""About as in training, see :mod:`pibroch.train.replanning`."""


def build_alltoall(case: Case) -> RankSubject:
    """Lookups in step, rows spread evenly."""
    return lookups(case, "alltoall")


def build_shared(case: Case) -> RankSubject:
    """Rows read where they are, and spread evenly."""
    return lookups(case, "retrieve")


def build_placed(case: Case) -> RankSubject:
    """Likewise, homes by a plan."""
    return lookups(case, "retrieve", "placed")


def build(case: Case) -> RankSubject:
    """Likewise, homes and copies by a plan."""
    return lookups(case, "retrieve", "copied")


def train_alltoall(case: Case) -> RankSubject:
    """Training under the plan for it."""
    return training(case, "alltoall")


def train_retrieve(case: Case) -> RankSubject:
    """The same with ``retrieve``."""
    return training(case, "retrieve")


def lookups(case: Case, exchange: str, plan: str | None = None) -> RankSubject:
    """A batch's embeddings a turn; the loss is a figure of all of them."""
    embeddings = _embeddings(case, exchange, plan).eval()
    batches = ours.jagged_batches(*rank_batches(case))

    def losses() -> Iterator[Tensor]:
        for batch in embeddings.feed(in_order(batches)):
            yield embeddings(batch).square().mean()

    return RankSubject(_without_gradients(losses()), ours.versions(), partial(_traffic, embeddings))


def training(case: Case, exchange: str) -> RankSubject:
    """DLRM, or where the case's model is ``none`` the tables alone."""
    embeddings = _embeddings(case, exchange, "training")
    batches = in_order(ours.jagged_batches(*rank_batches(case)))
    parts = ours.parts(case)
    if case.model != "none":
        losses = train(data_parallel(dense_model(case)), embeddings, batches, case, parts)
    else:
        losses = _train_tables(embeddings, batches)
    return RankSubject(losses, ours.versions(), partial(_traffic, embeddings))


def train_moving(case: Case) -> RankSubject:
    """Likewise, while all rows go to other homes, then back, and so on."""
    embeddings = _embeddings(case, "retrieve", "training")
    plans: Mapping[str, str] = case.exchange_options["plans"]
    targets = cycle(Plan.load(Path(plans[name])) for name in ("elsewhere", "training"))
    rows_per_step = max(
        1024, case.num_tables * case.num_rows // (dist.get_world_size() * STEPS_OF_A_MOVE)
    )
    batches = in_order(ours.jagged_batches(*rank_batches(case)))
    losses = train(data_parallel(dense_model(case)), embeddings, batches, case, ours.parts(case))

    def moving() -> Iterator[Tensor]:
        for loss in losses:
            if not embeddings.is_moving:
                embeddings.move_rows(next(targets), rows_per_step)
            yield loss

    return RankSubject(moving(), ours.versions(), partial(_traffic, embeddings))


class OneAsks:
    """Rank 0 looks up, and the others sleep.

    In own rows, a neighbour's, another host's, half own and half of those.
    """

    def __init__(self, case: Case) -> None:
        join(case)
        self._is_measured = os.environ["RANK"] == "0"
        self._embeddings = _embeddings(case, "retrieve", "by_table").eval()
        per_rank = case.num_tables // dist.get_world_size()
        ids_NFB = rank_batches(case)[0]
        owners = {"own": [0], "neighbour": [1], "far": [2], "half": [0, 2]}
        self._batches: dict[str, list[pb.JaggedBatch]] = {}
        for name, ranks in owners.items():
            tables = [t for t in range(case.num_tables) if t % dist.get_world_size() in ranks][
                : per_rank * len(ranks)
            ]
            samples = case.batch_size // len(ranks)
            self._batches[name] = [
                _of_tables(ids[tables, :samples], tables, case) for ids in ids_NFB
            ]

    def phases(self) -> dict[str, Callable[[int], object]]:
        """One for each place of rows."""
        return {name: partial(self._look_up, name) for name in self._batches}

    def _look_up(self, name: str, number: int) -> None:
        if self._is_measured:
            batches = self._batches[name]
            with torch.inference_mode():
                self._embeddings(batches[number % len(batches)])

    def check(self, steps: int) -> dict[str, list[float]]:
        """Whether rows of all places are the right ones."""
        return {}

    def versions(self) -> dict[str, str]:
        """See :class:`benchmarks.workers.serving.Subject`."""
        return ours.versions()


def build_one(case: Case) -> OneAsks:
    """See :class:`OneAsks`."""
    return OneAsks(case)


def _embeddings(case: Case, exchange: str, plan: str | None) -> pb.Embeddings:
    join(case)
    plans: Mapping[str, str] = case.exchange_options["plans"]
    options: dict[str, Any] = {} if plan is None else {"plan": plans[plan]}
    embeddings = pb.Embeddings(
        ours.tables(case), ours.sparse_optimizer(case), exchange=exchange, **options
    )
    with embeddings.rewriting() as views:
        for view in views:
            table = initial_table(case, int(view.piece.table.name[1:]))
            view.weights[:] = table[
                ids_of(view.piece.rows), view.piece.columns.start : view.piece.columns.stop
            ]
    dist.barrier()
    return embeddings


def _of_tables(ids_FB: Tensor, tables: list[int], case: Case) -> pb.JaggedBatch:
    keys = [f"C{table}" for table in tables]
    size = ids_FB.shape[1]
    batch = pb.JaggedBatch.from_one_hot(
        torch.zeros(size, 0), keys, ids_FB.contiguous(), torch.zeros(size)
    )
    return batch.with_empty(tuple(f"C{t}" for t in range(case.num_tables) if t not in tables))


def _train_tables(embeddings: pb.Embeddings, batches: Iterable[pb.JaggedBatch]) -> Iterator[Tensor]:
    for batch in embeddings.feed(batches):
        loss = embeddings(batch).square().mean()
        loss.backward()
        yield loss.detach()


def _without_gradients(losses: Iterator[Tensor]) -> Iterator[Tensor]:
    while True:
        with torch.inference_mode():
            result = list(islice(losses, 1))
        if not result:
            return
        yield result[0]


def _traffic(embeddings: pb.Embeddings) -> dict[str, float]:
    """Bytes of payload that this rank sent."""
    return {"sent": float(Ranks.joined().traffic.sent)}
