"""Some rows of an array, read where they are."""

from __future__ import annotations

from typing import Any

import numpy as np

from pibroch.embedding.piece import RowArray
from pibroch.kernels.arrays import Array, Ints


class ChosenRows:
    """A :class:`~pibroch.embedding.RowArray` of chosen rows of another one.

    Args:
        rows: of all.
        chosen: places in it, rising.
    """

    def __init__(self, rows: RowArray, chosen: Ints) -> None:
        self._rows = rows
        self._chosen = chosen
        self.dtype = rows.dtype
        self.shape = (len(chosen), *rows.shape[1:])
        self.ndim = rows.ndim
        self.itemsize = rows.itemsize
        self.nbytes = rows.itemsize * int(np.prod(self.shape, dtype=np.int64))

    def __len__(self) -> int:
        return len(self._chosen)

    def __array__(self) -> Array:
        return self[:]

    def copy(self) -> Array:
        """All of it."""
        return self[:]

    def __getitem__(self, places: Any) -> Array:
        return self._rows[self._chosen[places]]

    def __setitem__(self, places: Any, values: Any) -> None:
        self._rows[self._chosen[places]] = values
