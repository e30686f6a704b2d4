"""A server's rows as arrays that read and write through.

For those who save, load or look at tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pibroch.embedding import Frozen, Piece, PieceView, SparseOptimizer
from pibroch.embedding.row_set import ListedRows
from pibroch.kernels.arrays import Ints
from pibroch.servers import server
from pibroch.servers.client import EmbeddingServers
from pibroch.state.tensor_file import rows_that_fit

Array = NDArray[Any]


class RemoteRows:
    """A field of consecutive rows on a server, ``[rows, columns]``.

    Of marks of a name, ``[rows]``: then it stands for the field, and there are no columns.

    A :class:`~pibroch.embedding.RowArray`: slices and lists of rows are read and written in pieces
    that fit a buffer.
    """

    def __init__(
        self,
        servers: EmbeddingServers,
        number: int,
        rows: range,
        columns: range | None,
        field: str = "",
        cut: str | None = None,
    ) -> None:
        self._servers = servers
        self._number = number
        self._rows = rows
        self._columns = columns
        self._field = field
        self._cut = cut
        self.dtype = np.dtype(np.bool_ if columns is None else np.float32)
        self.shape = (len(rows),) if columns is None else (len(rows), len(columns))
        self.ndim = len(self.shape)
        self.itemsize = self.dtype.itemsize
        self.size = int(np.prod(self.shape, dtype=np.int64))
        self.nbytes = self.size * self.itemsize

    def __len__(self) -> int:
        return len(self._rows)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self[:] if dtype is None else self[:].astype(dtype)

    def copy(self) -> Array:
        """All of it."""
        return self[:]

    def __getitem__(self, chosen: slice) -> Array:
        rows = self._rows[chosen]
        out = np.empty((len(rows), *self.shape[1:]), self.dtype)
        columns = None if self._columns is None else _slice(self._columns)
        for at, part in self._parts(rows):
            how = self._field, part, columns, self._cut
            out[at] = self._servers.ask(self._number, server.read, *how).numpy()
        return out

    def __setitem__(self, chosen: Any, values: Any) -> None:
        columns = self._columns
        if isinstance(chosen, tuple):
            assert columns is not None, "rows have one mark"
            chosen, columns = chosen[0], columns[chosen[1]]
        if not isinstance(chosen, slice):
            rows = torch.from_numpy(
                np.asarray(chosen, np.int64) * self._rows.step + self._rows.start
            )
            self._write(rows, columns, values)
            return
        rows_ = self._rows[chosen]
        values = np.asarray(values)
        for at, part in self._parts(rows_):
            self._write(
                part, columns, values[at] if values.ndim and len(values) == len(rows_) else values
            )

    def _write(self, rows: slice | torch.Tensor, columns: range | None, values: Any) -> None:
        given = torch.from_numpy(np.ascontiguousarray(values, self.dtype))
        places = None if columns is None else _slice(columns)
        self._servers.ask(self._number, server.write, self._field, rows, places, given)

    def _parts(self, rows: range) -> list[tuple[slice, slice]]:
        """Pieces of rows that fit a buffer: their places among ``rows``, and in the shard."""
        step = rows_that_fit(self.itemsize * max(1, int(np.prod(self.shape[1:], dtype=np.int64))))
        starts = range(0, len(rows), step)
        return [
            (slice(at, min(at + step, len(rows))), _slice(rows[at : at + step])) for at in starts
        ]


class RemoteShard:
    """A server's shard, in the care of one trainer: a :class:`~pibroch.embedding.Shard`.

    Args:
        servers: the way to it.
        number: of the server.
        pieces: that it holds.
        optimizer: of all rows.
        cut: the name of the server's cut that it is; ``None`` for the shard itself.
    """

    def __init__(
        self,
        servers: EmbeddingServers,
        number: int,
        pieces: Sequence[Piece],
        optimizer: SparseOptimizer,
        cut: str | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._cut = cut
        self.pieces = tuple(pieces)
        self._fields = {"": servers.dim} | optimizer.state_fields(servers.dim)
        self._servers = servers
        self._number = number
        self._marked: list[str] = []
        bounds = np.cumsum([0, *(len(piece.rows) for piece in pieces)]).tolist()
        self._spans = [range(begin, end) for begin, end in pairwise(bounds)]
        self.num_bytes = 4 * servers.width * bounds[-1]

    def fill(self, seed: int) -> None:
        """See :meth:`MemoryShard.fill`."""
        self._servers.ask(self._number, server.fill, seed)

    def start_marks(self, name: str) -> None:
        """See :meth:`MemoryShard.start_marks`."""
        self._servers.ask(self._number, server.start_marks, name)
        if name not in self._marked:
            self._marked.append(name)

    def mark_all(self, name: str) -> None:
        """See :meth:`MemoryShard.mark_all`."""
        self._servers.ask(self._number, server.mark_all, name)

    def cut(self, name: str, with_state: bool = True) -> RemoteShard | None:
        """See :meth:`MemoryShard.cut`.

        The copy lies on the server, and may be read beside what goes on.
        """
        counts = self._servers.ask(self._number, server.cut, name, with_state)
        if counts is None:
            return None
        pieces = [
            replace(piece, rows=ListedRows(count, partial(self._cut_ids, name, place)))
            for place, (piece, count) in enumerate(zip(self.pieces, counts, strict=True))
        ]
        optimizer = self._optimizer if with_state else Frozen()
        return RemoteShard(self._servers, self._number, pieces, optimizer, name)

    def cut_in_place(self, name: str) -> list[PieceView] | None:
        """As :meth:`cut`, since others may be served meanwhile."""
        cut = self.cut(name)
        return None if cut is None else cut.views()

    def end_cut(self, name: str, is_saved: bool) -> None:
        """See :meth:`MemoryShard.end_cut`."""
        self._servers.ask(self._number, server.end_cut, name, is_saved)

    def kept(self, key: str, tag: str) -> RemoteKeptRows | None:
        """See :meth:`MemoryShard.kept`; the memory is of the server's machine."""
        steps = self._servers.ask(self._number, server.keep, key, tag)
        if steps is None:
            return None
        return RemoteKeptRows(partial(self._servers.ask, self._number, server.kept), set(steps))

    def _cut_ids(self, name: str, piece: int) -> Ints:
        return self._servers.ask(self._number, server.cut_ids, name, piece).numpy()

    def views(self) -> list[PieceView]:
        """The pieces with views of their numbers.

        What is written to these changes the server's rows.
        """
        views = []
        for piece, rows in zip(self.pieces, self._spans, strict=True):
            way = self._servers, self._number, rows
            fields = {
                name: RemoteRows(*way, range(width), name, self._cut)
                for name, width in self._fields.items()
            }
            weights = fields.pop("")
            marks = {name: RemoteRows(*way, None, name) for name in self._marked}
            views.append(PieceView(piece, weights, fields, marks))
        return views


class RemoteKeptRows:
    """A server's shard as it was, in memory that outlives the server.

    Does what a :class:`pibroch.state.kept_rows.KeptRows` does, and returns when the server has.

    Args:
        have: has the server do one of :data:`pibroch.servers.server.KEPT_ACTIONS`.
        steps: that were there when it was opened.
    """

    def __init__(self, have: Callable[..., None], steps: set[int]) -> None:
        self.begin = partial(have, "begin")
        self.go_on = partial(have, "go_on")
        self.cut = partial(have, "cut")
        self.settle = partial(have, "settle")
        self.restore = partial(have, "restore")
        self._steps = steps

    def steps(self) -> set[int]:
        """Of which ``restore`` is possible, as of the start."""
        return self._steps


def _slice(numbers: range) -> slice:
    return slice(numbers.start, numbers.stop, numbers.step)
