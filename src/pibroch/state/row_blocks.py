"""Moves rows between pieces, as a plan cuts tables, and blocks of consecutive rows.

All ranks know all extents, so messages need no headers; but of rows that a plan chose one by one
their holder says which they are. A round moves as many rows as fit into a small buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pibroch.collectives import Channel
from pibroch.embedding import PieceView, RowArray, Table
from pibroch.embedding.row_set import RowSet, as_slice, places_of, those_within
from pibroch.kernels.arrays import Ints, Records
from pibroch.state.parts import WEIGHT
from pibroch.state.tables import Extent, SavedTable
from pibroch.state.tensor_file import BUFFER_BYTES

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
        rank = self._channel.ranks.rank
        widths = _widths(saved, fields)
        out = {
            field: np.empty((len(blocks[rank]), width), np.float32)
            for field, width in widths.items()
        }
        for chunks in _rounds(blocks, sum(widths.values())):
            overlaps = self._overlaps(table, chunks, only_primary=True)
            send: list[list[Records]] = [[] for _ in blocks]
            counts = [0] * len(blocks)
            for (source, place, to), rows in overlaps.items():
                for field in fields:
                    if source == rank:
                        some = place.numbers(field)[place.span_of(rows)]
                        send[to].append(np.ascontiguousarray(some, np.float32))
                    if to == rank:
                        counts[source] += len(rows) * len(_columns(place, saved, field))
            received = self._exchange(send, counts)
            for (source, place, to), rows in overlaps.items():
                for field in fields if to == rank else ():
                    columns = _columns(place, saved, field)
                    numbers = received[source].take((len(rows), len(columns)))
                    out[field][rows - blocks[rank].start, as_slice(columns)] = numbers
        return out

    def spread(
        self, table: Table, saved: SavedTable, numbers: Mapping[str, Records], blocks: Blocks
    ) -> None:
        """Write this rank's block of a table into all pieces with its rows, also replicas."""
        rank = self._channel.ranks.rank
        fields = list(numbers)
        for chunks in _rounds(blocks, sum(_widths(saved, fields).values())):
            overlaps = self._overlaps(table, chunks, only_primary=False)
            send: list[list[Records]] = [[] for _ in blocks]
            counts = [0] * len(blocks)
            for (to, place, source), rows in overlaps.items():
                for field in fields:
                    columns = _columns(place, saved, field)
                    if source == rank:
                        some = numbers[field][rows - blocks[rank].start, as_slice(columns)]
                        send[to].append(np.ascontiguousarray(some, np.float32))
                    if to == rank:
                        counts[source] += len(rows) * len(columns)
            received = self._exchange(send, counts)
            for (to, place, source), rows in overlaps.items():
                for field in fields if to == rank else ():
                    shape = len(rows), len(_columns(place, saved, field))
                    place.numbers(field)[place.span_of(rows), slice(None)] = received[source].take(
                        shape
                    )

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
        flat = [rows for each in rows_by_owner for rows in each]
        lengths_here = [lengths[rank][ranks.rank] for rank in range(ranks.world_size)]
        received = self._channel.all_to_all(
            torch.from_numpy(np.concatenate(flat) if flat else np.empty(0, np.int64)),
            [sum(map(len, each)) for each in rows_by_owner],
            [sum(each) for each in lengths_here],
        )
        parts = iter(received.split([length for each in lengths_here for length in each]))
        return {overlap: next(parts).numpy() for overlap in unknown}

    def _of(self, table: Table, *, only_primary: bool) -> Iterator[tuple[int, _Place]]:
        for rank, pieces in enumerate(self._places):
            for place in pieces:
                if place.extent.table == table.name and (place.is_primary or not only_primary):
                    yield rank, place

    def _exchange(self, send: Sequence[Sequence[Records]], counts: Sequence[int]) -> list[_Arrived]:
        flat = [part.reshape(-1) for parts in send for part in parts]
        sent = torch.from_numpy(np.concatenate(flat) if flat else np.empty(0, np.float32))
        received = self._channel.all_to_all(
            sent, [sum(part.size for part in parts) for parts in send], counts
        )
        return [_Arrived(part.numpy()) for part in received.split(list(counts))]


class _Overlap(NamedTuple):
    """A piece on a rank, and the part of a block on another, or on the same, in a round."""

    holder: int
    place: _Place
    owner: int


class _Arrived:
    """Numbers from one rank, taken in the order in which they were sent."""

    def __init__(self, numbers: NDArray[np.float32]) -> None:
        self._numbers = numbers
        self._taken = 0

    def take(self, shape: tuple[int, int]) -> Records:
        first = self._taken
        self._taken = self._taken + shape[0] * shape[1]
        return self._numbers[first : self._taken].reshape(shape)


def _rounds(blocks: Blocks, width: int) -> Iterator[list[range]]:
    """Parts of all blocks, of so many rows that those for all ranks fit the buffer."""
    rows = max(1, BUFFER_BYTES // (4 * width * len(blocks)))
    for first in range(0, max(len(block) for block in blocks), rows):
        yield [block[first : first + rows] for block in blocks]


def _widths(saved: SavedTable, fields: Sequence[str]) -> dict[str, int]:
    return {field: saved.dim if field == WEIGHT else saved.state[field] for field in fields}


def _columns(place: _Place, saved: SavedTable, field: str) -> range:
    """The columns of a field that a piece has: its part of the weights, or all of other fields."""
    return range(*place.extent.columns) if field in saved.by_columns else range(saved.state[field])
