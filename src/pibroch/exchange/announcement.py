"""What ranks tell each other about a batch when they have read it: how large it is and which rows it touches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pibroch.data import JaggedBatch
from pibroch.embedding.rows import group_rows
from pibroch.errors import DataError, ProtocolError, RowIdError
from pibroch.exchange.grouping import BatchIds, group
from pibroch.exchange.row_lane import RowLane
from pibroch.kernels import parallel
from pibroch.kernels.route import numba as routing
from pibroch.kernels.scatter_update.numba import Grouped
from pibroch.kernels.varint import numba as varint
from pibroch.observability.trace import span


@dataclass(frozen=True, slots=True)
class Prepared:
    """A rank's own part of a batch.

    Attributes:
        ids: of it, without the rows themselves.
        grouped: its positions by distinct address, rising.
        row_of_position: int32 ``[V]``, the number of each position's address among the distinct ones.
        encoded: the distinct addresses as bytes.
        num_samples: of the part.
        problem: with the part; it then counts as without ids.
    """

    ids: BatchIds
    grouped: Grouped
    row_of_position: NDArray[np.int32]
    encoded: NDArray[np.uint8]
    num_samples: int
    problem: RowIdError | None


@dataclass(slots=True)
class Announcement:
    """A batch as all ranks know it.

    Attributes:
        here: this rank's own part.
        rows_of_rank: distinct addresses that each rank touches, none of a batch with a problem; empty where they are not told.
        share: this rank's share of the global batch.
        is_real: whether some rank's part is one of its own batches, and not a filler after its last one.
        problem: with some rank's part, as this rank is to report it.
    """

    here: Prepared
    rows_of_rank: Sequence[NDArray[Any]]
    share: float
    is_real: bool
    problem: DataError | None


def prepare(lane: RowLane, batch: JaggedBatch) -> Prepared:
    """What can be known of a batch without the other ranks."""
    with span("group"):
        ids, problem = lane.resolve(batch.select(lane.layout.features))
        grouped = group(ids)
        row_of_position = np.empty(len(ids.row_ids), np.int32)
        parallel.run(routing.places, len(grouped.rows), grouped, row_of_position)
    encoded = np.empty(varint.MAX_BYTES * len(grouped.rows), np.uint8)
    num_bytes = varint.encode(grouped.rows, encoded)
    ids = replace(ids, row_ids=np.empty(0, np.int64))
    return Prepared(ids, grouped, row_of_position, encoded[:num_bytes].copy(), batch.batch_size, problem)


def announce(lane: RowLane, here: Prepared, is_real: bool, tells_rows: bool = True) -> Announcement:
    """Tell all ranks and hear them; every rank calls it in the same order.

    Args:
        lane: of the rows.
        here: this rank's part.
        is_real: unless it is a filler after this rank's last batch.
        tells_rows: whether the rows themselves are told; without, nobody hears of others' rows.
    """
    channel, size = lane.channel, lane.world_size
    said = [-1 if here.problem else here.num_samples, is_real, len(here.grouped.rows), len(here.encoded)]
    with span("announce"):
        told = channel.exchange_counts(torch.tensor([said] * size)).numpy()
    rows = _exchange_rows(lane, here, told) if tells_rows else []
    problem: DataError | None = here.problem
    if (told[:, 0] < 0).any():
        problems = channel.gather(None if here.problem is None else str(here.problem))
        if problem is None:
            rank = next(rank for rank, text in enumerate(problems) if text is not None)
            problem = DataError(
                f"a bad batch on rank {rank}: {problems[rank]}", "ids inside their tables on every rank"
            )
        nothing = np.empty(0, np.int64)
        rows = [nothing] * len(rows)
        here = replace(here, grouped=group_rows(nothing), encoded=here.encoded[:0])
    share = here.num_samples / max(1, int(told[:, 0].sum()))
    return Announcement(here, rows, share, bool(told[:, 1].any()), problem)


def _exchange_rows(lane: RowLane, here: Prepared, told: NDArray[np.int64]) -> list[NDArray[Any]]:
    """The rows of all ranks, whose numbers and bytes ``told`` says."""
    size, own, received = lane.world_size, lane.rank, told[:, 3].tolist()
    sent = torch.from_numpy(here.encoded if size == 1 else np.tile(here.encoded, size))
    with span("announce rows"):
        came = lane.channel.all_to_all(sent, [len(here.encoded)] * size, received).numpy()
    rows, ends = [here.grouped.rows] * size, np.cumsum(received)
    for rank in range(size):
        if rank != own:
            rows[rank] = np.empty(told[rank, 2], np.int64)
            taken = varint.decode(came[ends[rank] - received[rank] : ends[rank]], rows[rank])
            if taken != received[rank]:
                raise ProtocolError(f"{received[rank]} bytes of rows from rank {rank}", "as many rows as it announced")
    return rows
