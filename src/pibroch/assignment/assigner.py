"""Samples go where their rows are: ids of a global batch in, a rank for each sample out.

A plain object. What it says depends on the batches since its last :meth:`RowAssigner.restart`, on
where rows are at home and on the number of ranks; so all who give it the same agree.

Shape legend: B samples of a global batch, F readers of tables, V ids, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pibroch.assignment.kernels import assign as kernels
from pibroch.assignment.rows_of import RowsOf
from pibroch.data import JaggedBatch
from pibroch.kernels import route as routing
from pibroch.kernels.arrays import Array, Ints

MOST_RANKS = 64
"""Between which samples are assigned: each pass takes time in proportion to them."""
MOST_LINES = 1 << 19
"""Lines of the table of rows, in 33 MB."""
PASSES = 2
"""After the first, in which samples choose. More gain little, and take a tenth more time each."""
MOST_READS_PER_RANK = 16
"""Rows that more samples a rank read are read by all ranks whoever trains what."""

SHARING = 2
"""What a rank more that reads a row counts where rows move to their readers, in what it costs now.

Ranks that read a row now read it again in later steps. Of 1 to 4 it is the best on real ids that
costs little on others.
"""


class Verdict(NamedTuple):
    """Where the samples of a global batch go.

    Attributes:
        ranks: int16 ``[B]``.
        transfers: what is expected to cross between ranks, in vectors of the narrowest rows.
        transfers_given: likewise with the samples as they came.
    """

    ranks: NDArray[np.int16]
    transfers: int
    transfers_given: int


class Assigner(Protocol):
    """Says which rank trains which sample; batches come in the order of training."""

    def restart(self) -> None:
        """Forget the batches so far."""

    def assign(self, batch: JaggedBatch, bounds: Sequence[int]) -> Verdict:
        """Where the samples of the next global batch go.

        Args:
            batch: ids of all its samples.
            bounds: ``[W + 1]``, rank r is to have ``bounds[r + 1] - bounds[r]`` samples.
        """


class RowAssigner:
    """Assigns samples so that few rows cross between ranks, see design note 0036.

    Where the samples as they came need no more, they stay there.

    Args:
        rows: of the exchange.
        passes, most_reads_per_rank: see the module.

    Example:
        >>> import pibroch as pb, torch
        >>> from pibroch.embedding import RowSpace
        >>> from pibroch.exchange.assigned import rows_under
        >>> from pibroch.exchange.layout import lay_out
        >>> tables = [pb.Table("a", num_rows=4, dim=2)]  # even rows lie on rank 0
        >>> layouts = lay_out(RowSpace(tables), pb.Plan.of(tables, 2, "row_wise"), rank=0)
        >>> ids = torch.tensor([[1, 3, 0, 2]])
        >>> batch = pb.JaggedBatch.from_one_hot(torch.zeros(4, 0), ["a"], ids, torch.zeros(4))
        >>> verdict = RowAssigner(rows_under(layouts, 2, horizon=9)).assign(batch, [0, 2, 4])
        >>> verdict.ranks.tolist(), verdict.transfers, verdict.transfers_given
        ([1, 1, 0, 0], 0, 4)
    """

    def __init__(
        self, rows: RowsOf, passes: int = PASSES, most_reads_per_rank: int = MOST_READS_PER_RANK
    ) -> None:
        self._rows = rows
        lanes = rows.lanes
        sizes = [int(lane.bounds[-1]) for lane in lanes]
        widths = [lane.width for lane in lanes]
        self._lanes = kernels.Lanes(
            np.repeat(np.arange(len(lanes)), [len(lane.features) for lane in lanes]),
            np.cumsum([1, *sizes[:-1]]),  # 0 is the key of a place that is free
            np.stack([lane.bounds for lane in lanes]),
            np.array([lane.num_everywhere for lane in lanes]),
            np.array([round(width / min(widths)) for width in widths]),
        )
        self._rules = kernels.Rules(
            rows.price, passes, most_reads_per_rank * rows.num_ranks, SHARING if rows.horizon else 1
        )
        num_lines = min(MOST_LINES, 1 << (sum(sizes) // (kernels.LINE // 2)).bit_length())
        self._table = np.zeros((num_lines, kernels.LINE), np.int64)
        self._now = 0
        self._room: kernels.Room | None = None
        self._addresses = np.empty(0, np.int64)

    def restart(self) -> None:
        """See :class:`Assigner`; all rows are at home."""
        self._now += self._rows.horizon + 1

    def assign(self, batch: JaggedBatch, bounds: Sequence[int]) -> Verdict:
        """See :class:`Assigner`."""
        rows = self._rows
        self._now += 1
        addresses, offsets = self._resolved(batch)
        sizes = np.array([after - first for first, after in pairwise(bounds)])
        room = self._room_for(len(addresses))
        num_rows = kernels.enter(
            self._table,
            self._now,
            rows.horizon,
            addresses,
            offsets,
            self._lanes,
            rows.num_ranks,
            room,
        )
        # the chosen one, and the one that was given
        both = np.empty((2, batch.batch_size), np.int16)
        both[1] = np.repeat(np.arange(rows.num_ranks), sizes)
        kernels.place(room, num_rows, offsets, sizes, self._rules, both[0])
        readers = np.zeros((num_rows, 2), np.int64)
        kernels.mark(room, offsets, both, readers)
        transfers = [
            int(kernels.count_transfers(room, of_one, self._rules.price)) for of_one in readers.T
        ]
        best = int(transfers[0] >= transfers[1])
        if rows.horizon:
            kernels.settle(self._table, self._now, room, readers[:, best])
        return Verdict(both[best], transfers[best], transfers[1])

    def _resolved(self, batch: JaggedBatch) -> tuple[Ints, Ints]:
        """Addresses of all readers' ids in their lanes, and where their bags begin.

        The first array is of this batch until the next.
        """
        readers = {feature for lane in self._rows.lanes for feature in lane.features}
        absent = tuple(sorted(readers - set(batch.keys)))
        batch = batch.with_empty(absent) if absent else batch
        picked = [batch.pick(lane.features) for lane in self._rows.lanes]
        num_ids = sum(of_lane.values.numel() for of_lane in picked)
        if len(self._addresses) < num_ids:
            self._addresses = np.empty(num_ids, np.int64)
        addresses = self._addresses[:num_ids]
        offsets: list[Array] = []
        begin = 0
        for lane, of_lane in zip(self._rows.lanes, picked, strict=True):
            values = lane.index.rows_of(of_lane)
            bags = of_lane.offsets.numpy()
            end = begin + len(values)
            bad = routing.resolve_addresses(values, bags, lane.homes, addresses[begin:end])
            if bad >= 0:
                raise lane.index.error(of_lane, bad)
            offsets.append(bags[1:] + begin if offsets else bags)
            begin = end
        return addresses, offsets[0] if len(offsets) == 1 else np.concatenate(offsets)

    def _room_for(self, num_ids: int) -> kernels.Room:
        """Arrays of at least this size, kept from batch to batch."""
        room = self._room
        if room is None or len(room.rows) < num_ids:
            self._room = room = kernels.Room(
                rows=np.empty(num_ids, np.int32),
                reads=np.empty(num_ids, np.int32),
                where=np.empty(num_ids, np.int16),
                home=np.empty(num_ids, np.int16),
                fetch=np.empty(num_ids, np.int32),
                share=np.empty(num_ids, np.int32),
                address=np.empty(num_ids, np.int64),
                slot=np.empty(num_ids, np.int64),
                shared=np.empty(num_ids + 1, np.int32),
            )
        return room
