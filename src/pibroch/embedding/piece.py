"""The part of a table that a shard holds: some rows, some columns. Whoever moves or saves rows works piece by piece."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pibroch.embedding.table import Table


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows and columns of a table that lie together.

    Attributes:
        table: the whole table.
        rows: ids inside the table, e.g. ``range(1, 1460, 2)``.
        columns: of its weights, e.g. ``range(0, 16)``.
        is_primary: whether this copy is the one to save; false for further replicas.
    """

    table: Table
    rows: range
    columns: range
    is_primary: bool = True


@dataclass(frozen=True, slots=True)
class PieceView:
    """The numbers of a piece; writing to the views changes the shard.

    Attributes:
        piece: which part of which table.
        weights: float32 ``[rows, columns]``.
        state: optimizer state by field, each ``[rows, floats]``: a field of a number for each column has the piece's columns,
            a field of one number a row has it whole.
        touched: bool ``[rows]``, set where a row was updated since it was last cleared; ``None`` when nobody asked for it.
    """

    piece: Piece
    weights: NDArray[np.float32]
    state: dict[str, NDArray[np.float32]]
    touched: NDArray[np.bool_] | None = None
