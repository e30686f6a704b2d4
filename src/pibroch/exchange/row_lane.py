"""Rows travel: distinct ids to their owners, rows back, one gradient a row to the owners, one update a row.

Shape legend: B samples of this rank, F features of the lane, D its width, V ids, U distinct rows, W ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.embedding.rows import group_rows, read_rows, update_rows
from pibroch.errors import RowIdError
from pibroch.exchange.column_norms import needs_whole_rows, with_whole_rows
from pibroch.exchange.grouping import BatchIds, group, is_one_hot, pooling_scale
from pibroch.exchange.lane import Lane
from pibroch.exchange.rows import pool, row_id_error
from pibroch.kernels import parallel
from pibroch.kernels.route import numba as routing
from pibroch.kernels.scatter_update.numba import Grouped

Records = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Route:
    """What a batch's ids led to.

    Attributes:
        ids: of this rank's part of the batch; rows are addresses.
        grouped: the same by distinct address, rising, so that each owner's are consecutive.
        places: int64 ``[V]``, the number of each position's address among the distinct ones.
        wanted: distinct rows that this rank wants of each rank, itself included.
        asked: int64, offsets of this rank's rows that all ranks want, in rank order.
        asked_counts: how many of them for each rank.
        updates: rows of this shard that the step updates, and the gradients that will come for them in rank order.
        update_counts: gradients from each rank.
        num_replicated: distinct replicated rows in this rank's part, the first of its own ones.
        share: this rank's share of the global batch.
        is_real: whether some rank's part is one of its own batches, and not a filler after its last one.
    """

    ids: BatchIds
    grouped: Grouped
    places: NDArray[np.int64]
    wanted: list[int]
    asked: NDArray[np.int64]
    asked_counts: list[int]
    updates: Grouped
    update_counts: list[int]
    num_replicated: int
    share: float
    is_real: bool


class RowLane(Lane):
    """Each distinct row travels once, and is pooled where it is needed."""

    def route(self, batch: JaggedBatch, is_real: bool = True) -> Route:
        """See :class:`Lane`."""
        layout, here = self.layout, self.rank
        ids, problem = self.resolve(batch.select(layout.features))
        grouped = group(ids)
        ends = np.searchsorted(grouped.rows, layout.bounds)
        wanted = np.diff(ends).tolist()
        replicated = int(np.searchsorted(grouped.rows, layout.bounds[here] + layout.num_replicated) - ends[here])
        said = [[-1 if problem else batch.batch_size, is_real, count, replicated] for count in wanted]
        told = self._tell(torch.tensor(said), problem)
        offsets = (grouped.rows - np.repeat(layout.bounds[:-1], wanted)).astype(self.id_type)
        own = offsets[ends[here] : ends[here + 1]]
        parts = [
            own if p == here else np.concatenate([offsets[ends[p] : ends[p + 1]], own[:replicated]])
            for p in range(self.world_size)
        ]
        asked_counts, replicated_counts = told[:, 2].tolist(), told[:, 3].tolist()
        replicated_counts[here] = 0  # among its own
        update_counts = [a + r for a, r in zip(asked_counts, replicated_counts, strict=True)]
        sent = torch.from_numpy(np.concatenate(parts))
        came = self.channel.all_to_all(sent, [len(part) for part in parts], update_counts)
        rows = came.numpy().astype(np.int64)
        places = np.empty(len(ids.row_ids), np.int64)
        parallel.run(routing.places, len(grouped.rows), grouped, places)
        return Route(
            ids, grouped, places, wanted, _without(rows, asked_counts, replicated_counts), asked_counts,
            group_rows(rows), update_counts, replicated, batch.batch_size / max(1, int(told[:, 0].sum())),
            bool(told[:, 1].any()),
        )  # fmt: skip

    def fetch(self, route: Route, averaged_at: int | None) -> Records:
        """The distinct rows ``[U, D]``, in the order of their addresses."""
        rows = torch.from_numpy(read_rows(self.shard, self.optimizer, route.asked, averaged_at))
        return self._carry(rows, route.asked_counts, route.wanted)

    def pool(self, route: Route, rows: Records) -> Tensor:
        """See :class:`Lane`."""
        return pool(route.ids, rows, route.places, self.layout.width)

    def combine(self, route: Route, gradient_BFD: Tensor) -> Tensor:
        """One gradient for each distinct row, ``[U, D]``, summed in sample order and weighted with this rank's share."""
        totals = np.empty((len(route.grouped.rows), self.layout.width), np.float32)
        gradients = gradient_BFD.numpy().reshape(-1, self.layout.width)
        share = np.float32(route.share)
        parallel.run(routing.sum_gradients, len(totals), route.grouped, gradients, share, totals)
        return torch.from_numpy(totals)

    def update(self, route: Route, totals: Tensor, learning_rate: float, step: int) -> None:
        """See :class:`Lane`."""
        counts = route.wanted
        if self.layout.num_replicated:
            parts = list(totals.split(counts))
            copies = parts[self.rank][: route.num_replicated]
            parts = [part if p == self.rank else torch.cat([part, copies]) for p, part in enumerate(parts)]
            totals, counts = torch.cat(parts), [len(part) for part in parts]
        gradients = self._carry(totals, counts, route.update_counts)
        updates, hyper = route.updates, self.optimizer.hyper(learning_rate, step)
        if needs_whole_rows(self.layout, self.optimizer):
            updates, gradients, hyper = with_whole_rows(
                self.layout, self.channel, self.shard, updates, gradients, hyper
            )
        update_rows(self.shard, self.optimizer, updates, gradients, hyper, step)

    def resolve(self, batch: JaggedBatch) -> tuple[BatchIds, RowIdError | None]:
        """The batch's ids as addresses; where one is outside its table, no ids and the error, for all ranks to hear of."""
        layout, num_features = self.layout, len(self.layout.features)
        values, offsets = batch.values.numpy(), batch.offsets.numpy()
        addresses, problem = np.empty(len(values), np.int64), None
        bad = routing.resolve_addresses(values, offsets, layout.homes, addresses)
        if bad >= 0:
            problem = row_id_error(layout.features, layout.homes.num_rows, batch, int(bad))
            addresses, offsets = addresses[:0], np.zeros(1, np.int64)
        scale = pooling_scale(batch, layout.mean)
        return BatchIds(addresses, offsets, scale, is_one_hot(batch), num_features, layout.shares_tables), problem


def _without(rows: NDArray[np.int64], kept: list[int], dropped: list[int]) -> NDArray[np.int64]:
    """Of each rank's rows the first ``kept``, not the ``dropped`` after them."""
    if not any(dropped):
        return rows
    ends = np.cumsum([k + d for k, d in zip(kept, dropped, strict=True)])
    return np.concatenate([rows[end - k - d : end - d] for end, k, d in zip(ends, kept, dropped, strict=True)])
