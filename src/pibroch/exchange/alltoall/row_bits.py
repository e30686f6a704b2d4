"""Rising offsets of copied rows as they travel: a list, or a bit for each where that is shorter."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pibroch.kernels.arrays import Ints


class RowSeries(NamedTuple):
    """The offsets ``first``, ``first + step``, ... below ``stop``.

    They are all copied rows, or those of one owner.
    """

    first: int
    step: int
    stop: int

    @property
    def rows(self) -> range:
        """All offsets of the series."""
        return range(self.first, self.stop, self.step)

    def num_words(self, id_type: DTypeLike) -> int:
        """How many numbers of a type it takes to have a bit for each offset."""
        return -(-len(self.rows) // (8 * np.dtype(id_type).itemsize))

    def bits(self, rows: Ints, id_type: DTypeLike) -> NDArray[np.signedinteger]:
        """A bit for each offset of the series: whether it is among ``rows``."""
        is_there = np.zeros(self.num_words(id_type) * 8 * np.dtype(id_type).itemsize, np.uint8)
        is_there[(rows - self.first) // self.step] = 1
        return np.packbits(is_there).view(id_type)

    def of_bits(self, bits: NDArray[np.signedinteger]) -> Ints:
        """The offsets whose bits are set, rising; int64."""
        return np.flatnonzero(np.unpackbits(bits.view(np.uint8))) * self.step + self.first

    def packed(self, rows: Ints, id_type: DTypeLike) -> tuple[NDArray[np.signedinteger], int]:
        """The shorter form of rising ``rows``, and its length, below 0 for bits."""
        if self.num_words(id_type) < len(rows):
            bits = self.bits(rows, id_type)
            return bits, -len(bits)
        return rows.astype(id_type), len(rows)

    def unpacked(self, numbers: NDArray[np.signedinteger], length: int) -> Ints:
        """The rows of :meth:`packed`, int64."""
        return self.of_bits(numbers) if length < 0 else numbers.astype(np.int64)
