"""A rank of DLRM, or of DLRM on towers, under one of pibroch's exchanges, on bags of several ids.

``exchange_options`` of the case say which: ``exchange``, ``towers`` (how many, and the width of
what they give; absent for a model without), and what else the exchange takes.

Shape legend: N batches, F features, B samples of a rank, M most ids of a bag.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

import pibroch as pb
from benchmarks.cases import BOTTOM_HIDDEN, TOP_SIZES, Arrays, Case
from benchmarks.workers import pibroch_tables as ours
from benchmarks.workers.distributed_pibroch import load_pieces, train
from benchmarks.workers.dlrm_pibroch import dense_model
from benchmarks.workers.ranks import RankSubject, in_order, join
from pibroch.collectives import data_parallel
from pibroch.exchange import place_towers
from pibroch.models import Model, build_model


def build(case: Case) -> RankSubject:
    """This rank's share."""
    join(case)
    options: dict[str, Any] = dict(case.exchange_options)
    exchange = options.pop("exchange")
    towers = options.pop("towers", None)
    tables = ours.tables(case)
    names = [table.name for table in tables]
    if exchange == "towers":
        options["groups"] = [names[first :: options["count"]] for first in range(options["count"])]
    options.pop("count", None)
    embeddings = pb.Embeddings(
        tables, optimizer=ours.sparse_optimizer(case), exchange=exchange, **options
    )
    load_pieces(embeddings, case)
    model = data_parallel(place_towers(model_of(case, towers), embeddings))
    losses = train(model, embeddings, in_order(bags(case)), case, ours.parts(case))

    def counts() -> dict[str, float]:
        sent = embeddings.exchange.report().bytes_by_purpose
        return {f"sent {purpose}": float(count) for purpose, count in sent.items()}

    return RankSubject(losses, ours.versions(), counts)


def model_of(case: Case, towers: dict[str, int] | None) -> Model:
    """DLRM with the case's starting weights, or one on towers with such as its seed gives."""
    if towers is None:
        return dense_model(case)
    torch.manual_seed(case.seed)
    return build_model(
        "tower_dlrm",
        case.num_dense,
        case.num_tables,
        dim=case.dim,
        bottom=BOTTOM_HIDDEN,
        top=TOP_SIZES[:-1],
        towers=towers,
    )


def bags(case: Case) -> list[pb.JaggedBatch]:
    """This rank's part of each global batch.

    Bags of 1 to M ids, whose lengths depend on the case's seed alone.
    """
    rank = int(os.environ["RANK"])
    arrays = Arrays.load(case.data)
    size = case.batch_size
    most = case.most_ids
    keys = tuple(f"C{table}" for table in range(case.num_tables))
    made = []
    for number, ids_FV in enumerate(arrays.ids):
        ids_FBM = ids_FV.reshape(case.num_tables, -1, most)[:, rank * size : (rank + 1) * size]
        lengths = np.random.default_rng([case.seed, number, rank]).integers(
            1, most + 1, ids_FBM.shape[:2]
        )
        values = ids_FBM[np.arange(most) < lengths[:, :, None]]
        offsets = np.concatenate([[0], lengths.reshape(-1).cumsum()])
        own = slice(rank * size, (rank + 1) * size)
        dense, labels = (
            torch.from_numpy(each[number, own].copy()) for each in (arrays.dense, arrays.labels)
        )
        made.append(
            pb.JaggedBatch(dense, keys, torch.from_numpy(values), torch.from_numpy(offsets), labels)
        )
    return made
