"""A server's rows as arrays that read and write through, for those who save, load or look at tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from pibroch.embedding import Piece, PieceView, SparseOptimizer
from pibroch.embedding.tensor_file import rows_that_fit
from pibroch.servers import server
from pibroch.servers.client import Homes

Array = NDArray[Any]


class RemoteRows:
    """Columns of consecutive rows on a server, ``[rows, columns]``; of whether rows were touched, ``[rows]``.

    Understands what files and programs do with an array: its shape, slices and lists of rows, read and written, in pieces
    that fit a buffer. ``numpy`` functions get a copy.
    """

    def __init__(self, homes: Homes, number: int, rows: range, columns: range | None) -> None:
        self._homes, self._number, self._rows, self._columns = homes, number, rows, columns
        self.dtype: np.dtype[Any] = np.dtype(np.bool_ if columns is None else np.float32)
        self.shape = (len(rows),) if columns is None else (len(rows), len(columns))

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.itemsize

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
        for at, part in self._parts(rows):
            if self._columns is None:
                came = self._homes.ask(self._number, server.read_touched, part)
            else:
                came = self._homes.ask(self._number, server.read, part, _slice(self._columns))
            out[at] = came.numpy()
        return out

    def __setitem__(self, chosen: Any, values: Any) -> None:
        columns = self._columns
        if isinstance(chosen, tuple):
            assert columns is not None, "rows have one mark"
            chosen, columns = chosen[0], columns[chosen[1]]
        if not isinstance(chosen, slice):
            rows = torch.from_numpy(np.asarray(chosen, np.int64) * self._rows.step + self._rows.start)
            self._write(rows, columns, values)
            return
        rows_ = self._rows[chosen]
        values = np.asarray(values)
        for at, part in self._parts(rows_):
            self._write(part, columns, values[at] if values.ndim and len(values) == len(rows_) else values)

    def _write(self, rows: Any, columns: range | None, values: Any) -> None:
        if columns is None:
            self._homes.ask(self._number, server.write_touched, rows, bool(values))
        else:
            given = torch.from_numpy(np.ascontiguousarray(values, np.float32))
            self._homes.ask(self._number, server.write, rows, _slice(columns), given)

    def _parts(self, rows: range) -> list[tuple[slice, slice]]:
        """Pieces of rows that fit a buffer: their places among ``rows``, and in the shard."""
        step = rows_that_fit(self.itemsize * max(1, int(np.prod(self.shape[1:], dtype=np.int64))))
        starts = range(0, len(rows), step)
        return [(slice(at, min(at + step, len(rows))), _slice(rows[at : at + step])) for at in starts]


class RemoteShard:
    """A server's shard, in the care of one trainer; what a :class:`MemoryShard` offers to those who save and load.

    Args:
        homes: the way to it.
        number: of the server.
        pieces: that it holds.
        optimizer: of all rows.
    """

    def __init__(self, homes: Homes, number: int, pieces: Sequence[Piece], optimizer: SparseOptimizer) -> None:
        self.pieces, self.dim, self.fields = tuple(pieces), homes.dim, optimizer.state_fields(homes.dim)
        self._homes, self._number, self._is_tracking = homes, number, False
        bounds = np.cumsum([0, *(len(piece.rows) for piece in pieces)]).tolist()
        self._spans = [range(begin, end) for begin, end in pairwise(bounds)]
        self.records = RemoteRows(homes, number, range(bounds[-1]), range(homes.width))

    def track_touched(self) -> None:
        """Mark updated rows from now on."""
        self._is_tracking = True
        self._homes.ask(self._number, server.track_touched)

    def views(self) -> list[PieceView]:
        """The pieces with views of their numbers; what is written to these changes the server's rows."""
        return [self._view(piece, span) for piece, span in zip(self.pieces, self._spans, strict=True)]

    def weights(self, table: str) -> Array:
        """View of a table's weights as far as they are here."""
        return next(view for view in self.views() if view.piece.table.name == table).weights

    def _view(self, piece: Piece, rows: range) -> PieceView:
        at, columns = self.dim, {}
        for name, width in self.fields.items():
            columns[name] = range(at, at + width)
            at += width
        weights = self._rows(rows, range(self.dim))
        state = {name: self._rows(rows, span) for name, span in columns.items()}
        return PieceView(piece, weights, state, self._rows(rows, None) if self._is_tracking else None)

    def _rows(self, rows: range, columns: range | None) -> Array:
        return cast(Array, RemoteRows(self._homes, self._number, rows, columns))


def _slice(numbers: range) -> slice:
    return slice(numbers.start, numbers.stop, numbers.step)
