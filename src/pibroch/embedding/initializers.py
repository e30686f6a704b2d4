"""Initial weights as a function of seed, table and element, the same on whichever shard.

Element ``e`` of a table draws its numbers from SplitMix64 (Steele et al. 2014) at counter ``e``, so
no generator has to be stepped through the rows before it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from pibroch.errors import ConfigError
from pibroch.kernels.arrays import Ints
from pibroch.kernels.fill import fill_normal, fill_uniform

Weights = NDArray[np.float32]


@runtime_checkable
class Initializer(Protocol):
    """Fills a table's weights in place."""

    def fill(self, weights: Weights, rows: Ints, key: int) -> None:
        """Write float32 ``weights`` ``[R, D]`` of these rows of the table, int64 ``[R]``."""


def stream_key(seed: int, table: str) -> int:
    """The 64-bit key of a table's random stream."""
    digest = hashlib.blake2b(f"{seed}/{table}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True, slots=True)
class Zeros:
    """All weights 0."""

    def fill(self, weights: Weights, rows: Ints, key: int) -> None:
        """See :class:`Initializer`."""
        weights[:] = 0.0


@dataclass(frozen=True, slots=True)
class Uniform:
    """Uniform in ``[center - bound, center + bound)``.

    Without a bound, ``1 / sqrt(num_rows)`` as the reference dlrm does.
    """

    bound: float | None = None
    center: float = 0.0

    def fill(self, weights: Weights, rows: Ints, key: int) -> None:
        """See :class:`Initializer`."""
        if self.bound is None:
            raise ConfigError(
                "Uniform without a bound", "a bound", "let Table.resolved_initializer() set it"
            )
        fill_uniform(weights, rows, key, self.bound)
        if self.center:
            weights += np.float32(self.center)


@dataclass(frozen=True, slots=True)
class Normal:
    """Normal with mean 0; the last ``zero_columns``, first-order weights of DeepFM, stay 0."""

    std: float = 0.01
    zero_columns: int = 0

    def fill(self, weights: Weights, rows: Ints, key: int) -> None:
        """See :class:`Initializer`."""
        fill_normal(weights, rows, key, self.std)
        if self.zero_columns:
            weights[:, -self.zero_columns :] = 0.0
