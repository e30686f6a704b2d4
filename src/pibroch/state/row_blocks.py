"""Moves rows between pieces, as a plan cuts tables, and blocks of consecutive rows.

All ranks know all extents, so messages need no headers; but of rows that a plan chose one by one
their holder says which they are. A round moves as many rows as fit into a small buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from pibroch.collectives import Channel
from pibroch.embedding import PieceView, RowArray, Table
from pibroch.embedding.row_set import RowSet, as_slice, places_of, those_within
from pibroch.kernels.arrays import Array, Ints, Records
from pibroch.state.parts import WEIGHT
from pibroch.state.tables import Extent, SavedTable

ROUND_BYTES = 8 << 20
"""Of all blocks' rows that move at a time."""
Blocks = Sequence[range]
"""For each rank the consecutive rows of a table that it has, or is to have.

They may overlap, or be none.
"""


def even_blocks(num_rows: int, num_ranks: int) -> list[range]:
    """As ``torch.chunk`` cuts rows, and with it a DTensor's ``Shard(0)``.

    >>> even_blocks(5, 4)
    [range(0, 2), range(2, 4), range(4, 5), range(5, 5)]
    """
    size = -(-num_rows // num_ranks)
    bounds = [min(rank * size, num_rows) for rank in range(num_ranks + 1)]
    return [range(first, after) for first, after in pairwise(bounds)]


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """A piece on some rank; other ranks' views are not here."""

    extent: Extent
    is_primary: bool
    view: PieceView | None

    @property
    def rows(self) -> RowSet:
        """Its rows; of rows that a plan chose one by one their holder knows alone."""
        return range(*self.extent.rows) if self.view is None else self.view.piece.rows

    def rows_in(self, block: range) -> Ints:
        """Ids of those of its rows that lie in a block."""
        return those_within(self.rows, block)

    def span_of(self, rows: Ints) -> slice:
        """The places of rows that :meth:`rows_in` returned among its rows."""
        first = int(places_of(self.rows, rows[:1])[0])
        return slice(first, first + len(rows))

    def numbers(self, field: str) -> RowArray:
        """A field of all its rows, which are here."""
        assert self.view is not None
        return self.view.weights if field == WEIGHT else self.view.state[field]


class RowBlocks:
    """Moves rows of tables; every rank makes one, and makes the same calls.

    Args:
        channel: between the ranks.
        views: the pieces that this rank holds.
    """

    def __init__(self, channel: Channel, views: Sequence[PieceView]) -> None:
        self._channel = channel
        here = channel.ranks.rank
        self._places: list[list[_Place]] = []
        for rank, pieces in enumerate(
            channel.gather([[*Extent.of(v.piece), v.piece.is_primary] for v in views])
        ):
            places = []
            for number, (table, rows, columns, num_listed, is_primary) in enumerate(pieces):
                view = views[number] if rank == here else None
                places.append(
                    _Place(Extent(table, tuple(rows), tuple(columns), num_listed), is_primary, view)
                )
            self._places.append(places)

    def collect(
        self, table: Table, saved: SavedTable, fields: Sequence[str], blocks: Blocks
    ) -> dict[str, Records]:
        """This rank's block of a table: of each field float32 ``[rows, floats]``.

        Blocks until it is there. Beside it, it takes the memory of a small buffer.
        """
        size = len(blocks[self._channel.ranks.rank])
        widths = _widths(saved, fields)
        out = {field: np.empty((size, width), np.float32) for field, width in widths.items()}
        self._move(table, saved, out, blocks, to_block=True)
        return out

    def spread(
        self, table: Table, saved: SavedTable, numbers: Mapping[str, Records], blocks: Blocks
    ) -> None:
        """Write this rank's block of a table into all pieces with its rows, also replicas."""
        self._move(table, saved, numbers, blocks, to_block=False)

    def _move(
        self,
        table: Table,
        saved: SavedTable,
        numbers: Mapping[str, Records],
        blocks: Blocks,
        *,
        to_block: bool,
    ) -> None:
        """Move fields of pieces to ``numbers``, this rank's block of them, or from it to pieces."""
        rank = self._channel.ranks.rank
        first = blocks[rank].start
        for chunks in _rounds(blocks, sum(_widths(saved, list(numbers)).values())):
            overlaps = self._overlaps(table, chunks, only_primary=to_block)
            send: list[list[Records]] = [[] for _ in blocks]
            counts = [0] * len(blocks)
            for (holder, place, owner), rows in overlaps.items():
                source, target = (holder, owner) if to_block else (owner, holder)
                for field, of_block in numbers.items():
                    columns = _columns(place, saved, field)
                    if source == rank:
                        some = (
                            place.numbers(field)[place.span_of(rows)]
                            if to_block
                            else of_block[rows - first, as_slice(columns)]
                        )
                        send[target].append(np.ascontiguousarray(some, np.float32).reshape(-1))
                    if target == rank:
                        counts[source] += len(rows) * len(columns)
            received = sent_to_ranks(self._channel, send, counts, np.float32)
            for (holder, place, owner), rows in overlaps.items():
                source, target = (holder, owner) if to_block else (owner, holder)
                for field, of_block in numbers.items() if target == rank else ():
                    columns = _columns(place, saved, field)
                    some = received[source].take(len(rows), len(columns))
                    if to_block:
                        of_block[rows - first, as_slice(columns)] = some
                    else:
                        place.numbers(field)[place.span_of(rows), slice(None)] = some

    def _overlaps(
        self, table: Table, chunks: Blocks, *, only_primary: bool
    ) -> dict[_Overlap, Ints]:
        """The rows that a piece and a block have in common, where one of the two is this rank's."""
        rank = self._channel.ranks.rank
        overlaps = dict[_Overlap, Ints]()
        unknown = list[_Overlap]()
        for holder, place in self._of(table, only_primary=only_primary):
            for owner, chunk in enumerate(chunks):
                if rank not in (holder, owner):
                    continue
                if place.extent.num_listed and holder != rank:
                    unknown.append(_Overlap(holder, place, owner))
                overlaps[_Overlap(holder, place, owner)] = place.rows_in(chunk)
        if any(place.extent.num_listed for _, place in self._of(table, only_primary=only_primary)):
            overlaps |= self._exchange_rows(overlaps, unknown)
        return {overlap: rows for overlap, rows in overlaps.items() if len(rows)}

    def _exchange_rows(
        self, overlaps: Mapping[_Overlap, Ints], unknown: Sequence[_Overlap]
    ) -> dict[_Overlap, Ints]:
        """The rows of this rank's block in other ranks' pieces of rows that a plan chose.

        Sends others the same of this rank's pieces.
        """
        ranks = self._channel.ranks
        rows_by_owner: list[list[Ints]] = [[] for _ in range(ranks.world_size)]
        for (holder, place, owner), rows in overlaps.items():
            if place.extent.num_listed and holder == ranks.rank != owner:
                rows_by_owner[owner].append(rows)
        lengths: list[list[list[int]]] = self._channel.gather(
            [[len(rows) for rows in each] for each in rows_by_owner]
        )
        lengths_here = [each[ranks.rank] for each in lengths]
        counts = [sum(each) for each in lengths_here]
        received = sent_to_ranks(self._channel, rows_by_owner, counts, np.int64)
        sizes = [iter(each) for each in lengths_here]
        return {each: received[each.holder].take(next(sizes[each.holder])) for each in unknown}

    def _of(self, table: Table, *, only_primary: bool) -> Iterator[tuple[int, _Place]]:
        for rank, pieces in enumerate(self._places):
            for place in pieces:
                if place.extent.table == table.name and (place.is_primary or not only_primary):
                    yield rank, place


class _Overlap(NamedTuple):
    """A piece on a rank, and the part of a block on another, or on the same, in a round."""

    holder: int
    place: _Place
    owner: int


class Arrived:
    """Numbers from one rank, taken in the order in which they were sent."""

    def __init__(self, numbers: Array) -> None:
        self.numbers = numbers
        self._taken = 0

    def take(self, *shape: int) -> Array:
        """The next ones."""
        first = self._taken
        self._taken += math.prod(shape)
        return self.numbers[first : self._taken].reshape(shape)


def sent_to_ranks(
    channel: Channel,
    going: Sequence[Sequence[Array]],
    counts: Sequence[int],
    kind: type[np.generic],
) -> list[Arrived]:
    """Send each rank flat arrays of one kind; returns what each has sent, so many numbers."""
    flat = np.concatenate([np.empty(0, kind), *(part for parts in going for part in parts)])
    sent = [sum(map(len, parts)) for parts in going]
    received = channel.all_to_all(torch.from_numpy(flat), sent, counts)
    return [Arrived(part.numpy()) for part in received.split(list(counts))]


def _rounds(blocks: Blocks, width: int) -> Iterator[list[range]]:
    """Parts of all blocks, of so many rows that those for all ranks fit the buffer."""
    rows = max(1, ROUND_BYTES // (4 * width * len(blocks)))
    for first in range(0, max(len(block) for block in blocks), rows):
        yield [block[first : first + rows] for block in blocks]


def _widths(saved: SavedTable, fields: Sequence[str]) -> dict[str, int]:
    return {field: saved.dim if field == WEIGHT else saved.state[field] for field in fields}


def _columns(place: _Place, saved: SavedTable, field: str) -> range:
    """The columns of a field that a piece has: its part of the weights, or all of other fields."""
    return range(*place.extent.columns) if field in saved.by_columns else range(saved.state[field])
