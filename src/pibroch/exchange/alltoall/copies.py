"""Gradients of rows of which every rank has a copy: how all ranks get the same sum, in rank order.

Three ways, by the rows that a rank sends. With W ranks, r the distinct copied rows of its part of
the batch, R those of the whole batch, C all that there are:

- *gather*: its own gradients to every other rank, ``(W - 1) r``, in one message with those of other
  rows.
- *sparse*: each to the row's owner, who sends the sum to every rank, ``(W - 1) / W (r + R)``: the
  local-aggregated sparse all-reduce of OPER (Sec. 5.3). A ring would sum in another order than that
  of the ranks.
- *dense*: likewise, but of all copied rows, read or not, ``2 (W - 1) / W C``.

Which rows these are, ranks say by number, or by a bit for each copied row where that is shorter.

The copied row at offset o belongs to rank o % W, so that hot rows, which may lie side by side,
spread over the owners.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch

from pibroch.config.exchange import BITS_AT_ONCE
from pibroch.embedding.rows import NO_SCALE, group_rows, rising
from pibroch.exchange.alltoall.row_bits import RowSeries
from pibroch.exchange.messages import Counts, Messages, Rows, Values
from pibroch.kernels import scatter_update as updating
from pibroch.kernels.arrays import Array, Ints, Records, RowIds
from pibroch.kernels.scatter_update import Grouped


class OwnedCopies(ABC):
    """One batch's copied rows, where owners sum them.

    Args:
        num_rows: C.
        rank: this one.
        world_size: W.
        own: int64, offsets of this rank's distinct copied rows, rising.

    Attributes:
        gradients_go_along: whether owners get them in one message with those of other rows.
    """

    gradients_go_along: bool

    def __init__(self, num_rows: int, rank: int, world_size: int, own: Ints) -> None:
        self.num_rows = num_rows
        self.rank = rank
        self.world_size = world_size
        self.own = own
        self._owned = group_rows(own[:0])
        self._counts: list[int] = []
        self._rows = own[:0]

    def series(self, rank: int) -> RowSeries:
        """The copied rows that belong to a rank."""
        return RowSeries(rank, self.world_size, self.num_rows)

    def owned_by(self, rank: int) -> Ints:
        """Places among this rank's rows of those that belong to a rank."""
        return np.flatnonzero(self.own % self.world_size == rank)

    def exchange_read(self, read: Ints, id_type: Any) -> Messages[None]:
        """Exchange which copied rows each rank read: those that the step updates on all ranks.

        Args:
            read: int64, offsets of this rank's rows that the ranks read, in rank order.
            id_type: in which offsets travel.
        """
        places = np.flatnonzero((read < self.num_rows) & (read % self.world_size == self.rank))
        self._owned = group_rows(read[places])._replace(source=places.astype(np.int32))
        series_by_rank = [self.series(rank) for rank in range(self.world_size)]
        sizes = [series.num_words(id_type) for series in series_by_rank]
        sends_bits = max(sizes) <= BITS_AT_ONCE
        if sends_bits:
            numbers = series_by_rank[self.rank].bits(self._owned.rows, id_type)
        else:
            numbers = self._owned.rows.astype(id_type)
            counts = yield Counts(torch.full((self.world_size, 1), len(numbers)))
            sizes = counts.tensor[:, 0].tolist()
        answer = yield Values(
            _repeated(numbers, self.world_size), [len(numbers)] * self.world_size, sizes
        )
        parts = [part.numpy() for part in answer.tensor.split(sizes)]
        if sends_bits:
            parts = [
                series.of_bits(part) for series, part in zip(series_by_rank, parts, strict=True)
            ]
        self._counts = [len(part) for part in parts]
        self._rows = np.concatenate(parts).astype(np.int64)

    def updates(self) -> Grouped:
        """The rows that the step updates on every rank, with the places of their sums in `sums`."""
        order = np.argsort(self._rows)
        positions = rising(len(order))
        segments = rising(len(order) + 1)
        return Grouped(
            self._rows[order],
            segments,
            positions,
            self._places_of_sums()[order].astype(np.int32),
            NO_SCALE,
        )

    @abstractmethod
    def _places_of_sums(self) -> RowIds:
        """The place of the sum of each row that some rank read."""

    @abstractmethod
    def sums(self, received: Records, own: Records) -> Messages[Records]:
        """Sums of copied rows' gradients, the same on all ranks.

        Args:
            received: gradients of the rows that `exchange_read` was given.
            own: of this rank's rows.
        """

    def _to_all(self, sums: Records, counts: list[int]) -> Messages[Records]:
        answer = yield Rows(_repeated(sums, self.world_size), [len(sums)] * self.world_size, counts)
        return answer.tensor.numpy()


class SparseSums(OwnedCopies):
    """Sums of the gradients of those copied rows that some rank read."""

    gradients_go_along = True

    def _places_of_sums(self) -> RowIds:
        return rising(len(self._rows))

    def sums(self, received: Records, own: Records) -> Messages[Records]:
        """See :class:`OwnedCopies`."""
        totals = np.empty((len(self._owned.rows), received.shape[1]), np.float32)
        updating.sum_gradients(received, self._owned, 1.0, totals)
        return (yield from self._to_all(totals, self._counts))


class DenseSums(OwnedCopies):
    """Sums of the gradients of all copied rows: those that were not read add zeros."""

    gradients_go_along = False

    def _places_of_sums(self) -> RowIds:
        firsts = np.cumsum([0, *self._owned_counts()])
        return firsts[self._rows % self.world_size] + self._rows // self.world_size

    def _owned_counts(self) -> list[int]:
        return [len(range(rank, self.num_rows, self.world_size)) for rank in range(self.world_size)]

    def sums(self, received: Records, own: Records) -> Messages[Records]:
        """See :class:`OwnedCopies`."""
        counts = self._owned_counts()
        width = own.shape[1]
        firsts = np.cumsum([0, *counts])
        all_gradients = np.zeros((self.num_rows, width), np.float32)
        all_gradients[firsts[self.own % self.world_size] + self.own // self.world_size] = own
        here = counts[self.rank]
        answer = yield Rows(torch.from_numpy(all_gradients), counts, [here] * self.world_size)
        parts = answer.tensor.numpy().reshape(self.world_size, here, width)
        totals = parts[0].copy()
        for part in parts[1:]:
            totals += part
        return (yield from self._to_all(totals, counts))


WAYS: dict[str, type[OwnedCopies] | None] = {
    "gather": None,
    "sparse": SparseSums,
    "dense": DenseSums,
}


def _repeated(rows: Array, times: int) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([rows] * times))
