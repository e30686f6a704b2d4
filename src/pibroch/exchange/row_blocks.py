"""Rows on their way between pieces, as a plan cuts tables, and blocks of consecutive rows, as others want them.

All ranks know all extents, so that nobody has to say what it sends. A round moves as many rows as fit into a small buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from pibroch.collectives import Channel
from pibroch.embedding import PieceView, RowArray, Table
from pibroch.embedding.checkpoint import Extent, SavedTable
from pibroch.embedding.parts import WEIGHT, as_slice, common, places
from pibroch.embedding.tensor_file import BUFFER_BYTES
from pibroch.kernels.arrays import Records

Blocks = Sequence[range]
"""For each rank the consecutive rows of a table that it has, or is to have; they may overlap, or be none."""


def even_blocks(num_rows: int, num_ranks: int) -> list[range]:
    """As ``torch.chunk`` cuts rows, and with it a DTensor's ``Shard(0)``.

    >>> even_blocks(5, 4)
    [range(0, 2), range(2, 4), range(4, 5), range(5, 5)]
    """
    size = -(-num_rows // num_ranks)
    bounds = [min(rank * size, num_rows) for rank in range(num_ranks + 1)]
    return [range(first, after) for first, after in pairwise(bounds)]


@dataclass(frozen=True, slots=True)
class _Place:
    """A piece on some rank; of other ranks' pieces the numbers are not here."""

    extent: Extent
    is_primary: bool
    numbers: Mapping[str, RowArray] | None


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
        for rank, pieces in enumerate(channel.gather([[*Extent.of(v.piece), v.piece.is_primary] for v in views])):
            found = []
            for number, (table, rows, columns, is_primary) in enumerate(pieces):
                view = views[number] if rank == here else None
                numbers = None if view is None else {WEIGHT: view.weights, **view.state}
                found.append(_Place(Extent(table, tuple(rows), tuple(columns)), is_primary, numbers))
            self._places.append(found)

    def collect(self, table: Table, saved: SavedTable, fields: Sequence[str], blocks: Blocks) -> dict[str, Records]:
        """This rank's block of a table: of each field float32 ``[rows, floats]``. Blocks until it is there.

        Beside it, memory is that of a small buffer.
        """
        rank, widths = self._channel.ranks.rank, _widths(saved, fields)
        out = {field: np.empty((len(blocks[rank]), width), np.float32) for field, width in widths.items()}
        for chunks in _rounds(blocks, sum(widths.values())):
            send: list[list[Records]] = [[] for _ in blocks]
            counts = [0] * len(blocks)
            for source, place in self._of(table, only_primary=True):
                for to, chunk in enumerate(chunks):
                    both = common(range(*place.extent.rows), chunk)
                    if not both:
                        continue
                    for field in fields:
                        columns = _columns(place, saved, field)
                        if source == rank:
                            rows = as_slice(places(both, range(*place.extent.rows)))
                            assert place.numbers is not None
                            send[to].append(np.ascontiguousarray(place.numbers[field][rows], np.float32))
                        if to == rank:
                            counts[source] += len(both) * len(columns)
            came = self._exchange(send, counts)
            for source, place in self._of(table, only_primary=True):
                both = common(range(*place.extent.rows), chunks[rank])
                for field in fields if both else ():
                    columns = _columns(place, saved, field)
                    target = out[field][as_slice(places(both, blocks[rank]))]
                    target[:, as_slice(columns)] = came[source].take((len(both), len(columns)))
        return out

    def spread(self, table: Table, saved: SavedTable, numbers: Mapping[str, Records], blocks: Blocks) -> None:
        """The reverse: write this rank's block of a table into all pieces that have some of its rows, replicas included."""
        rank, fields = self._channel.ranks.rank, list(numbers)
        for chunks in _rounds(blocks, sum(_widths(saved, fields).values())):
            send: list[list[Records]] = [[] for _ in blocks]
            counts = [0] * len(blocks)
            for to, place in self._of(table, only_primary=False):
                for source, chunk in enumerate(chunks):
                    both = common(range(*place.extent.rows), chunk)
                    for field in fields if both else ():
                        columns = _columns(place, saved, field)
                        if source == rank:
                            some = numbers[field][as_slice(places(both, blocks[rank]))]
                            send[to].append(np.ascontiguousarray(some[:, as_slice(columns)], np.float32))
                        if to == rank:
                            counts[source] += len(both) * len(columns)
            came = self._exchange(send, counts)
            for place in (place for to, place in self._of(table, only_primary=False) if to == rank):
                assert place.numbers is not None
                for source, chunk in enumerate(chunks):
                    both = common(range(*place.extent.rows), chunk)
                    for field in fields if both else ():
                        rows = as_slice(places(both, range(*place.extent.rows)))
                        shape = len(both), len(_columns(place, saved, field))
                        place.numbers[field][rows, slice(None)] = came[source].take(shape)

    def _of(self, table: Table, *, only_primary: bool) -> Iterator[tuple[int, _Place]]:
        for rank, pieces in enumerate(self._places):
            for place in pieces:
                if place.extent.table == table.name and (place.is_primary or not only_primary):
                    yield rank, place

    def _exchange(self, send: Sequence[Sequence[Records]], counts: Sequence[int]) -> list[_Arrived]:
        flat = [part.reshape(-1) for parts in send for part in parts]
        going = torch.from_numpy(np.concatenate(flat) if flat else np.empty(0, np.float32))
        came = self._channel.all_to_all(going, [sum(part.size for part in parts) for parts in send], counts)
        return [_Arrived(part.numpy()) for part in came.split(list(counts))]


class _Arrived:
    """Numbers from one rank, taken in the order in which they were sent."""

    def __init__(self, numbers: NDArray[np.float32]) -> None:
        self._numbers, self._taken = numbers, 0

    def take(self, shape: tuple[int, int]) -> Records:
        first, self._taken = self._taken, self._taken + shape[0] * shape[1]
        return self._numbers[first : self._taken].reshape(shape)


def _rounds(blocks: Blocks, width: int) -> Iterator[list[range]]:
    """Parts of all blocks, of so many rows that those for all ranks fit the buffer."""
    rows = max(1, BUFFER_BYTES // (4 * width * len(blocks)))
    for first in range(0, max(len(block) for block in blocks), rows):
        yield [block[first : first + rows] for block in blocks]


def _widths(saved: SavedTable, fields: Sequence[str]) -> dict[str, int]:
    return {field: saved.dim if field == WEIGHT else saved.state[field] for field in fields}


def _columns(place: _Place, saved: SavedTable, field: str) -> range:
    """Of a field, what a piece has: its columns of the weights, or a row's one number whole."""
    return range(*place.extent.columns) if field in saved.by_columns else range(saved.state[field])
