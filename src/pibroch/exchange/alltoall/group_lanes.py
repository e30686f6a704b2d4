"""The lanes of one group of tables: parts of what is not pooled are joined, gradients split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.embedding import RowSpace, TableGroup
from pibroch.exchange.alltoall.lane import Lane
from pibroch.exchange.alltoall.pooled_lane import PartialSumLane, PooledLane
from pibroch.exchange.alltoall.row_lane import RowLane
from pibroch.exchange.layout import LaneLayout
from pibroch.exchange.rows import spans_of


class _Cell(NamedTuple):
    """What a lane holds of a reader: its place in the group, and the columns of its table."""

    place: int
    columns: slice


@dataclass(frozen=True)
class GroupLanes:
    """The lanes of one group of tables, which together have all of its blocks.

    Attributes:
        tables: of the group.
        lanes: with all blocks of its tables.
    """

    tables: TableGroup
    lanes: Sequence[Lane]

    def assemble(self, batch: JaggedBatch, parts: Sequence[Tensor]) -> Tensor:
        """The embeddings of a batch from those of the lanes.

        Pooled ones are in one tensor of all lanes already. Of others each lane gives
        ``[V_lane, width]``, and the result is ``[V, D]`` in the order of the batch's values.
        """
        if self._is_simple or (self.space.is_pooled and not batch.by_id):
            return parts[0]
        spans = spans_of(self.space, batch)
        out = torch.empty(spans[-1].stop, self.space.dim)
        for lane, part in zip(self.lanes, parts, strict=True):
            start = 0
            for cell in _cells(lane):
                span = spans[cell.place]
                out[span, cell.columns] = part[start : start + span.stop - span.start]
                start += span.stop - span.start
        return out

    def split(self, batch: JaggedBatch, gradient: Tensor) -> list[Tensor]:
        """The inverse of :meth:`assemble`."""
        if self._is_simple or (self.space.is_pooled and not batch.by_id):
            return [gradient] * len(self.lanes)
        spans = spans_of(self.space, batch)
        return [
            torch.cat([gradient[spans[cell.place], cell.columns] for cell in _cells(lane)])
            for lane in self.lanes
        ]

    @property
    def space(self) -> RowSpace:
        """The addresses of the group's rows."""
        return self.tables.space

    @cached_property
    def _is_simple(self) -> bool:
        """Whether one lane has all readers in their order."""
        return len(self.lanes) == 1 and self.lanes[0].layout.places == tuple(
            range(len(self.space.features))
        )


def assemble(
    groups: Sequence[GroupLanes], batch: JaggedBatch, pooled: Sequence[Tensor]
) -> list[Tensor]:
    """The embeddings of each group from those of all lanes."""
    parts = iter(pooled)
    return [each.assemble(batch, [next(parts) for _ in each.lanes]) for each in groups]


def split(
    groups: Sequence[GroupLanes], batch: JaggedBatch, gradients: Sequence[Tensor]
) -> list[Tensor]:
    """The inverse of :func:`assemble`, for gradients."""
    pairs = zip(groups, gradients, strict=True)
    return [part for each, gradient in pairs for part in each.split(batch, gradient)]


def lane_type(layout: LaneLayout) -> type[Lane]:
    """The kind of lane that a layout asks for."""
    if not layout.owners_pool:
        return RowLane
    return PartialSumLane if layout.cuts_bags else PooledLane


def _cells(lane: Lane) -> Iterator[_Cell]:
    layout = lane.layout
    for place, first in zip(layout.places, layout.first_columns, strict=True):
        yield _Cell(place, slice(first, first + layout.width))
