"""Pooled vectors travel: bags to the owner of their table, one vector a bag back, one gradient a bag to the owner.

Fewer bytes than rows where bags are long and repeat little. The owner does for each rank what that rank would have done with
the rows, in the same order, so the numbers are those of :mod:`pibroch.exchange.row_lane`.

Shape legend: B_p samples of rank p, F_p features whose tables rank p holds, D width of the lane.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.embedding.rows import NO_SCALE, group_rows, read_rows, update_rows
from pibroch.exchange.grouping import BatchIds, group, pooling_scale
from pibroch.exchange.lane import Lane
from pibroch.exchange.rows import pool, row_id_error
from pibroch.kernels import parallel
from pibroch.kernels.route import numba as routing
from pibroch.kernels.scatter_update.numba import Grouped

Records = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class BagRoute:
    """What a batch's ids led to.

    Attributes:
        num_samples: B_p of each rank p.
        bags: of each rank, those of tables held here; rows are offsets in this shard.
        grouped: the same by distinct row.
        updates: rows of this shard that the step updates; their gradients come rank by rank, each rank's by distinct row.
        is_real: see :class:`Lane`.
    """

    num_samples: list[int]
    bags: list[BatchIds]
    grouped: list[Grouped]
    updates: Grouped
    is_real: bool


class PooledLane(Lane):
    """The owner of a table pools its bags for all ranks; the lane's features stand in the order of their owners."""

    def route(self, batch: JaggedBatch, is_real: bool = True) -> BagRoute:
        """See :class:`Lane`."""
        layout, batch = self.layout, batch.select(self.layout.features)
        offsets, values = batch.offsets.numpy(), batch.values.numpy()
        addresses, problem = np.empty(len(values), np.int64), None
        bad = routing.resolve_addresses(values, offsets, layout.homes, addresses)
        if bad >= 0:
            problem = row_id_error(layout.features, layout.homes.num_rows, batch, int(bad))
        scale = pooling_scale(batch, layout.mean)
        messages = [self._message(p, addresses, offsets, scale) for p in range(self.world_size)]
        counts = [len(message) for message in messages]
        said = [[-1 if problem else batch.batch_size, is_real, count, len(scale) > 0] for count in counts]
        told = self._tell(torch.tensor(said), problem)
        came = self.channel.all_to_all(torch.cat(messages), counts, told[:, 2].tolist())
        pieces = zip(came.split(told[:, 2].tolist()), told, strict=True)
        bags = [self._bags(piece.numpy(), int(size), bool(scaled)) for piece, (size, _, _, scaled) in pieces]
        grouped = [group(ids) for ids in bags]
        updates = group_rows(np.concatenate([each.rows for each in grouped]))
        return BagRoute(told[:, 0].tolist(), bags, grouped, updates, bool(told[:, 1].any()))

    def fetch(self, route: BagRoute, averaged_at: int | None) -> Records:
        """For each owner in turn its features' vectors, ``[B * F_p, D]``."""
        pooled = [
            self._pooled(ids, grouped, averaged_at) for ids, grouped in zip(route.bags, route.grouped, strict=True)
        ]
        return self._carry(torch.cat(pooled), [len(part) for part in pooled], self._own_bags(route))

    def pool(self, route: BagRoute, fetched: Records) -> Tensor:
        """See :class:`Lane`."""
        size, width = route.num_samples[self.rank], self.layout.width
        parts = torch.from_numpy(fetched).split(self._own_bags(route))
        shapes = zip(parts, self.layout.num_features_of_shard, strict=True)
        return torch.cat([part.view(size, count, width) for part, count in shapes], 1)

    def combine(self, route: BagRoute, gradient_BFD: Tensor) -> Tensor:
        """The gradients of each owner's bags in turn, ``[B * F, D]``."""
        parts = gradient_BFD.split(list(self.layout.num_features_of_shard), 1)
        return torch.cat([part.reshape(-1, self.layout.width) for part in parts])

    def update(self, route: BagRoute, gradients: Tensor, learning_rate: float, step: int) -> None:
        """See :class:`Lane`."""
        counts = [len(ids.offsets) - 1 for ids in route.bags]
        came = self._carry(gradients, self._own_bags(route), counts)
        ends, size = np.cumsum([0, *counts]), max(1, sum(route.num_samples))
        totals = []
        for p, grouped in enumerate(route.grouped):
            total = np.empty((len(grouped.rows), self.layout.width), np.float32)
            share = np.float32(route.num_samples[p] / size)
            parallel.run(routing.sum_gradients, len(total), grouped, came[ends[p] : ends[p + 1]], share, total)
            totals.append(total)
        hyper = self.optimizer.hyper(learning_rate, step)
        update_rows(self.shard, self.optimizer, route.updates, np.concatenate(totals), hyper, step)

    def _own_bags(self, route: BagRoute) -> list[int]:
        """This rank's bags by owner."""
        return [route.num_samples[self.rank] * count for count in self.layout.num_features_of_shard]

    def _pooled(self, ids: BatchIds, grouped: Grouped, averaged_at: int | None) -> Tensor:
        """One rank's bags, ``[B_p * F, D]``."""
        records, rows = self.shard.records, ids.row_ids
        if averaged_at is not None:
            records = read_rows(self.shard, self.optimizer, ids.row_ids, averaged_at)
            rows = np.arange(len(rows))
        return pool(ids, records, rows, self.layout.width).view(-1, self.layout.width)

    def _message(self, owner: int, addresses: NDArray[np.int64], offsets: NDArray[np.int64], scale: Records) -> Tensor:
        """Lengths, offsets of rows, and scales if there are any, of one owner's bags, as bytes."""
        ends = np.cumsum([0, *self.layout.num_features_of_shard])
        bags_a_feature = (len(offsets) - 1) // max(1, int(ends[-1]))
        first, last = ends[owner] * bags_a_feature, ends[owner + 1] * bags_a_feature
        span = slice(offsets[first], offsets[last])
        lengths = np.diff(offsets[first : last + 1]).astype(np.int32)
        rows = (addresses[span] - self.layout.bounds[owner]).astype(self.id_type)
        parts = [lengths, rows, scale[span] if len(scale) else NO_SCALE]
        return torch.from_numpy(np.concatenate([part.view(np.uint8) for part in parts]))

    def _bags(self, message: NDArray[np.uint8], num_samples: int, scaled: bool) -> BatchIds:
        """What :meth:`_message` said."""
        num_features = self.layout.num_features_of_shard[self.rank]
        num_bags = num_features * num_samples
        lengths = message[: 4 * num_bags].view(np.int32)
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        num_ids, start = int(offsets[-1]), 4 * num_bags
        end = start + num_ids * self.id_type.itemsize
        rows = np.frombuffer(message[start:end].tobytes(), self.id_type).astype(np.int64)
        scale = np.frombuffer(message[end:].tobytes(), np.float32) if scaled else NO_SCALE
        one_hot = num_ids == num_bags and bool((lengths == 1).all())
        return BatchIds(rows, offsets, scale, one_hot, max(1, num_features), self.layout.shares_tables)
