"""Weights of 16 bits as whoever saves, loads or looks at tables knows weights: in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pibroch.embedding.piece import RowArray
from pibroch.kernels.arrays import Array
from pibroch.kernels.narrow import nearest, widened


class NarrowRows:
    """Bfloat16 numbers in memory, a :class:`~pibroch.embedding.RowArray`.

    Reads give copies, writes are rounded to the nearest.

    What was read is exact, so writing it back changes nothing.

    Args:
        numbers: uint16 ``[rows, columns]``, the upper halves of float32.
    """

    def __init__(self, numbers: NDArray[np.uint16]) -> None:
        self._numbers = numbers
        self.dtype = np.dtype(np.float32)
        self.shape = numbers.shape
        self.ndim = numbers.ndim
        self.size = numbers.size
        self.itemsize = self.dtype.itemsize
        self.nbytes = self.dtype.itemsize * numbers.size

    def __len__(self) -> int:
        return len(self._numbers)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self[:] if dtype is None else self[:].astype(dtype)

    def copy(self) -> Array:
        """All of it."""
        return self[:]

    def __getitem__(self, chosen: Any) -> Array:
        return widened(self._numbers[chosen])

    def __setitem__(self, chosen: Any, values: object) -> None:
        wide = np.ascontiguousarray(values, np.float32)
        narrow = np.empty(wide.shape, np.uint16)
        nearest(wide.reshape(1, -1), narrow.reshape(1, -1))
        self._numbers[chosen] = narrow

    def as_tensor(self) -> Tensor:
        """A view, as torch's bfloat16."""
        return torch.from_numpy(self._numbers.view(np.int16)).view(torch.bfloat16)


def tensor_of(rows: RowArray) -> Tensor:
    """A view of rows in this process's memory, float32 or bfloat16."""
    return rows.as_tensor() if isinstance(rows, NarrowRows) else torch.from_numpy(rows)
