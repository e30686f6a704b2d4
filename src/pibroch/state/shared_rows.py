"""Rows of all ranks as files of a delta take them: whole, by their ids among all tables' rows.

Each rank gives the rows that it holds. Those of tables that a plan cuts by columns lie in parts on
several ranks: they are brought together, each rank taking an even part of such a table's rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch

from pibroch.collectives import Channel
from pibroch.embedding import PieceView
from pibroch.embedding.row_set import ids_of
from pibroch.kernels.arrays import Ints, Records
from pibroch.state.delta_rows import RowsToWrite
from pibroch.state.export_format import ExportedTable


def files_of_rank(
    views: Sequence[PieceView], tables: Mapping[str, ExportedTable], channel: Channel
) -> list[list[RowsToWrite]]:
    """This rank's rows by file, whose parts rise; every rank calls it.

    Args:
        views: its pieces.
        tables: by name.
        channel: between the ranks.
    """
    held = [view for view in views if view.piece.is_primary]
    own = {view.piece.table.name for view in held if len(view.piece.columns) < view.piece.table.dim}
    cut = sorted({name for names in channel.gather(sorted(own)) for name in names})
    parts = [
        RowsToWrite(tables[view.piece.table.name].first_row + ids_of(view.piece.rows), view.weights)
        for view in held
        if view.piece.table.name not in cut and len(view.piece.rows)
    ]
    for name in cut:
        pieces = [view for view in held if view.piece.table.name == name]
        together = _brought_together(pieces, tables[name], channel)
        parts += [together] if len(together.row_ids) else []
    files: list[list[RowsToWrite]] = []
    for part in sorted(parts, key=lambda part: int(part.row_ids[0])):
        for file in files:
            if file[-1].row_ids[-1] < part.row_ids[0]:
                file.append(part)
                break
        else:
            files.append([part])
    return files


def _brought_together(
    pieces: Sequence[PieceView], table: ExportedTable, channel: Channel
) -> RowsToWrite:
    """Rows of a table whose columns lie on several ranks, as far as this rank takes them."""
    size = channel.ranks.world_size
    going_ids: list[list[Ints]] = [[] for _ in range(size)]
    going: list[list[Records]] = [[] for _ in range(size)]
    headers: list[list[tuple[int, int, int]]] = [[] for _ in range(size)]
    for view in pieces:
        ids = ids_of(view.piece.rows)
        bounds = np.searchsorted(ids, [rank * table.num_rows // size for rank in range(size + 1)])
        for rank, (begin, end) in enumerate(pairwise(bounds)):
            columns = view.piece.columns
            headers[rank].append((int(end - begin), columns.start, columns.stop))
            going_ids[rank].append(ids[begin:end])
            going[rank].append(np.ascontiguousarray(view.weights[begin:end], np.float32).ravel())
    coming = [each[channel.ranks.rank] for each in channel.gather(headers)]
    ids_in = _sent(channel, going_ids, [sum(n for n, *_ in each) for each in coming], np.int64)
    numbers = _sent(
        channel, going, [sum(n * (b - a) for n, a, b in each) for each in coming], np.float32
    )
    rows, places = np.unique(ids_in, return_inverse=True)
    dim = max((stop for each in coming for *_, stop in each), default=0)
    weights = np.empty((len(rows), dim), np.float32)
    num_columns = np.zeros(len(rows), np.int64)
    first = 0
    for count, start, stop in (header for each in coming for header in each):
        here = places[:count]
        places = places[count:]
        after = first + count * (stop - start)
        weights[here, start:stop] = numbers[first:after].reshape(count, stop - start)
        num_columns[here] += stop - start
        first = after
    assert (num_columns == dim).all(), "all columns of a row are updated together"
    return RowsToWrite(table.first_row + rows, weights)


def _sent(
    channel: Channel,
    going: Sequence[Sequence[np.ndarray[tuple[int, ...], np.dtype[np.generic]]]],
    counts: Sequence[int],
    kind: type[np.generic],
) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    flat = np.concatenate([np.empty(0, kind), *(part for parts in going for part in parts)])
    sent = [sum(map(len, parts)) for parts in going]
    return channel.all_to_all(torch.from_numpy(flat), sent, counts).numpy()
