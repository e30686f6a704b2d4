"""Where each reader has its pooled embeddings in one tensor ``[B, S]``, whatever their dims.

A lookup writes there, and an update reads the gradients from there, so that nothing is put together
or taken apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from math import gcd

import numpy as np

from pibroch.kernels.arrays import Ints


@dataclass(frozen=True, eq=False)
class Columns:
    """Where some readers of one dim have their embeddings.

    Attributes:
        width: S, of the tensor.
        dim: D, of these readers.
        first: int64 ``[F]``, the first column of each.

    Example:
        >>> wide, narrow = Columns(10, 4, np.array([0, 6])), Columns(10, 2, np.array([4]))
        >>> wide.unit, wide.first_rows, wide.rows_per_sample, narrow.unit
        (2, array([0, 3]), 5, 2)
    """

    width: int
    dim: int
    first: Ints

    @cached_property
    def unit(self) -> int:
        """Columns in which all is counted.

        A gradient ``[B, S]`` seen as ``[N, unit]`` has whole rows of each reader's.
        """
        return gcd(self.width, self.dim, *self.first.tolist())

    @cached_property
    def first_rows(self) -> Ints:
        """Of each reader the first of a sample's rows in ``[N, unit]``."""
        return self.first // self.unit

    @cached_property
    def rows_per_sample(self) -> int:
        """Rows of a sample in ``[N, unit]``."""
        return self.width // self.unit

    def part(self, places: Sequence[int], first_columns: Sequence[int], dim: int) -> Columns:
        """Of each reader at these places a block, from ``first_columns`` of its table on."""
        return Columns(
            self.width, dim, self.first[list(places)] + np.array(first_columns, np.int64)
        )


@lru_cache(maxsize=64)
def alone(num_readers: int, dim: int) -> Columns:
    """Readers with a tensor of their own."""
    return Columns(num_readers * dim, dim, np.arange(num_readers) * dim)


def side_by_side(dims: Mapping[int, int]) -> tuple[int, dict[int, int]]:
    """S and the first column of each reader, from the dims of all by their places.

    Example:
        >>> side_by_side({2: 8, 0: 4, 3: 1})
        (13, {0: 0, 2: 4, 3: 12})
    """
    places = sorted(dims)
    *first, width = accumulate((dims[place] for place in places), initial=0)
    return width, dict(zip(places, first, strict=True))
