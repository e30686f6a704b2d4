"""Rows travel: ids to their owners, rows back, gradients to the owners, each for a distinct row.

Shape legend: B samples of this rank, F features of the lane, D its width, V ids, U distinct rows, W
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.embedding.rows import NO_SCALE, group_rows, read_rows, update_rows
from pibroch.errors import RowIdError
from pibroch.exchange.alltoall.column_norms import needs_whole_rows, with_whole_rows
from pibroch.exchange.alltoall.copies import WAYS, OwnedCopies
from pibroch.exchange.alltoall.lane import Lane, LaneQuestion, Route
from pibroch.exchange.alltoall.row_bits import RowSeries
from pibroch.exchange.fresh_rows import FreshRecords
from pibroch.exchange.messages import Messages, Values
from pibroch.exchange.rows import BatchIds, DistinctRows, pool
from pibroch.kernels import route as routing
from pibroch.kernels.arrays import Bytes, Ints, Records, RowIds
from pibroch.kernels.route import Homes
from pibroch.kernels.scatter_update import Grouped


@dataclass(frozen=True, slots=True)
class DistinctRoute(Route):
    """The route of a batch of which each distinct row travels once and is pooled by its reader.

    Attributes:
        here: this rank's part of the batch.
        share: this rank's share of the global batch.
        is_real: see :class:`Route`.
    """

    here: DistinctRows
    share: float
    is_real: bool

    def pool(self, fetched: Records, room_BS: Tensor | None) -> Tensor:
        """See :class:`Route`."""
        return pool(self.here.ids, fetched, self.here.places, fetched.shape[1], room_BS)

    def combine(self, gradient: Tensor) -> Tensor:
        """One gradient for each distinct row, see :meth:`DistinctRows.sums`."""
        return torch.from_numpy(self.here.sums(gradient, self.share))


@dataclass(frozen=True, slots=True)
class RowRoute(DistinctRoute):
    """The same where rows are on the ranks.

    Attributes:
        lane: of the rows.
        counts_wanted: distinct rows that this rank wants of each rank, itself included.
        rows_given: int64, offsets of this rank's rows that all ranks want, in rank order.
        counts_given: how many of them for each rank.
        updates: rows of this shard that the step updates, and the gradients that other ranks will
            send for them, in rank order.
        update_counts: gradients from each rank.
        num_replicated: distinct replicated rows in this rank's part, the first of its own ones.
        copies: their way where owners sum them; ``None`` where each rank sends all others its own.
        fresh: rows of this shard that begin anew with the batch.
    """

    lane: RowLane
    counts_wanted: list[int]
    rows_given: Ints
    counts_given: list[int]
    updates: Grouped
    update_counts: list[int]
    num_replicated: int
    copies: OwnedCopies | None
    fresh: FreshRecords | None

    def begin(self) -> None:
        """See :class:`Route`."""
        if self.fresh is not None:
            self.fresh.begin(self.lane.shard)

    def fetch(self, averaged_at: int | None) -> Messages[Records]:
        """The distinct rows ``[U, D]``, in the order of their addresses."""
        weights = read_rows(self.lane.shard, self.lane.optimizer, self.rows_given, averaged_at)
        if self.fresh is not None:
            self.fresh.show(self.rows_given, weights)
        rows = torch.from_numpy(weights)
        return (yield from self.lane.carry(rows, self.counts_given, self.counts_wanted))

    def update(self, gradients: Tensor, learning_rate: float, step: int) -> Messages[None]:
        """See :class:`Route`."""
        lane = self.lane
        counts = self.counts_wanted
        if lane.is_frozen:
            return
        layout = lane.layout
        optimizer = lane.optimizer
        own = gradients[:0]
        if layout.num_replicated:
            parts = gradients.split(counts)
            own = parts[lane.rank][: self.num_replicated]
            along = [
                own[:0] if rank == lane.rank else self._along(own, rank)
                for rank in range(len(counts))
            ]
            gradients = torch.cat(
                [half for both in zip(parts, along, strict=True) for half in both]
            )
            counts = [count + len(copied) for count, copied in zip(counts, along, strict=True)]
        received_all = received = yield from lane.carry(gradients, counts, self.update_counts)
        updates = self.updates
        hyper = optimizer.hyper(learning_rate, step)
        if needs_whole_rows(layout, optimizer):
            updates, received, hyper = yield from with_whole_rows(
                layout, lane.rank, lane.shard, updates, received, hyper
            )
        update_rows(lane.shard, optimizer, updates, received, hyper, step)
        if self.copies is not None:
            sums = yield from self.copies.sums(received_all, own.numpy())
            hyper = optimizer.hyper(learning_rate, step)
            update_rows(lane.shard, optimizer, self.copies.updates(), sums, hyper, step)

    def _along(self, own: Tensor, rank: int) -> Tensor:
        """The gradients of this rank's copied rows that go to another with those of its rows."""
        if self.copies is None:
            return own
        return own[self.copies.owned_by(rank)] if self.copies.gradients_go_along else own[:0]


class RowLane(Lane):
    """Each distinct row travels once, and is pooled where it is needed.

    Attributes:
        replicas: how gradients of copied rows are summed, see
            :mod:`pibroch.exchange.alltoall.copies`.
    """

    replicas = "gather"

    def route(self, batch: JaggedBatch, is_real: bool = True) -> Messages[Route]:
        """See :class:`Lane`."""
        layout = self.layout
        rank = self.rank
        ids, problem = self.resolve(batch.pick(layout.features))
        here = DistinctRows.of(ids)
        rows = here.grouped.rows
        ends, offsets = self._by_owner(rows)
        counts_wanted = np.diff(ends).tolist()
        replicated = int(
            np.searchsorted(rows, layout.bounds[rank] + layout.num_replicated) - ends[rank]
        )
        own = offsets[ends[rank] : ends[rank + 1]]
        copies = self._owned_copies(own[:replicated])
        copied = [
            own[:replicated] if copies is None else own[copies.owned_by(p)]
            for p in range(self.world_size)
        ]
        packed = [
            self._copied(copies, p).packed(rows, self.id_type) for p, rows in enumerate(copied)
        ]
        heads = [
            [-1 if problem else batch.batch_size, is_real, count, length]
            for count, (_, length) in zip(counts_wanted, packed, strict=True)
        ]
        received = yield from self.exchange_heads(torch.tensor(heads), problem)
        parts = [
            own if p == rank else np.concatenate([offsets[ends[p] : ends[p + 1]], packed[p][0]])
            for p in range(self.world_size)
        ]
        counts_given = received[:, 2].tolist()
        lengths = received[:, 3].tolist()
        lengths[rank] = 0  # among its own
        sizes = [count + abs(length) for count, length in zip(counts_given, lengths, strict=True)]
        answer = yield Values(
            torch.from_numpy(np.concatenate(parts)), [len(part) for part in parts], sizes
        )
        rows_given, updated, update_counts = _apart(
            answer.tensor.numpy(), counts_given, lengths, self._copied(copies, rank)
        )
        updates = group_rows(updated) if copies is None else group_rows(updated[:0])
        if copies is not None:
            yield from copies.exchange_read(updated, self.id_type)
            if not copies.gradients_go_along:
                updated = rows_given
                update_counts = counts_given
            places = np.flatnonzero(updated >= layout.num_replicated)
            updates = group_rows(updated[places])._replace(source=places.astype(np.int32))
        return RowRoute(
            here,
            batch.batch_size / max(1, int(received[:, 0].sum())),
            bool(received[:, 1].any()),
            self,
            counts_wanted,
            rows_given,
            counts_given,
            updates,
            update_counts,
            replicated,
            copies,
            self.own_fresh(batch),
        )

    def _copied(self, copies: OwnedCopies | None, rank: int) -> RowSeries:
        """The copied rows of which this rank tells a rank."""
        return (
            RowSeries(0, 1, self.layout.num_replicated) if copies is None else copies.series(rank)
        )

    def _owned_copies(self, own: RowIds) -> OwnedCopies | None:
        """This rank's copied rows, where owners sum their gradients."""
        way = WAYS[self.replicas]
        num_rows = self.layout.num_replicated
        if way is None or not num_rows or self.world_size == 1 or self.is_frozen:
            return None
        return way(num_rows, self.rank, self.world_size, own.astype(np.int64))

    def ask(self, batch: JaggedBatch) -> LaneQuestion:
        """See :class:`Lane`."""
        ids, problem = self.resolve(batch.pick(self.layout.features))
        if problem is not None:
            raise problem
        here = DistinctRows.of(ids)
        ends, offsets = self._by_owner(here.grouped.rows)
        parts = [offsets[start:end].view(np.uint8) for start, end in pairwise(ends.tolist())]

        def pool_rows(answers: Sequence[Records], room_BS: Tensor | None) -> Tensor:
            return pool(ids, np.concatenate(answers), here.places, self.layout.width, room_BS)

        return LaneQuestion(parts, [0] * len(parts), np.diff(ends).tolist(), pool_rows)

    def answer(
        self, question: Bytes, num_samples: int, note: int, averaged_at: int | None
    ) -> Records:
        """See :class:`Lane`."""
        offsets = question.view(self.id_type).astype(np.int64)
        return read_rows(self.shard, self.optimizer, offsets, averaged_at)

    def _by_owner(self, rows: Ints) -> tuple[Ints, NDArray[np.signedinteger]]:
        """The bounds of each owner's rows among rising addresses, and all offsets in its shard."""
        bounds = self.layout.bounds
        ends: Ints = np.searchsorted(rows, bounds)
        return ends, (rows - np.repeat(bounds[:-1], np.diff(ends))).astype(self.id_type)

    def resolve(
        self, batch: JaggedBatch, homes: Homes | None = None
    ) -> tuple[BatchIds, RowIdError | None]:
        """The batch's ids as addresses, by the layout's homes or others.

        Where one has no row, there are no ids, and the error is for all ranks to hear of.
        """
        layout = self.layout
        rows = layout.index.rows_of(batch)
        addresses = np.empty(len(rows), np.int64)
        problem = None
        bad = routing.resolve_addresses(
            rows, batch.offsets.numpy(), layout.homes if homes is None else homes, addresses
        )
        if bad >= 0:
            problem = layout.index.error(batch, int(bad))
            return BatchIds(
                addresses[:0], np.zeros(1, np.int64), NO_SCALE, False, 1, False
            ), problem
        return BatchIds.of(addresses, batch, layout.readers, self.columns), problem


def _apart(
    numbers: NDArray[np.signedinteger], counts: list[int], lengths: list[int], copied: RowSeries
) -> tuple[Ints, Ints, list[int]]:
    """What the ranks sent, in rank order.

    ``counts`` rows that each asks for, then copied rows, in ``lengths`` numbers.

    Returns:
        The rows that ranks ask for; these, with the copied ones of each rank after its own; how
        many each rank has of both.
    """
    if not any(lengths):
        rows = numbers.astype(np.int64)
        return rows, rows, counts
    ends = np.cumsum(
        [count + abs(length) for count, length in zip(counts, lengths, strict=True)]
    ).tolist()
    rows_given = []
    both = []
    for end, count, length in zip(ends, counts, lengths, strict=True):
        start = end - abs(length)
        rows_given.append(numbers[start - count : start].astype(np.int64))
        both += [rows_given[-1], copied.unpacked(numbers[start:end], length)]
    each = [len(first) + len(second) for first, second in zip(both[::2], both[1::2], strict=True)]
    return np.concatenate(rows_given), np.concatenate(both), each
