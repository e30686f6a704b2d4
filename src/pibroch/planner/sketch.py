"""Accesses of an endless stream in bounded memory, recent ones counting more.

A summary of Misra and Gries, merged batch by batch (Agarwal et al., "Mergeable Summaries", 2012):
at most C rows have counters; when there are more, the (C + 1)-th largest count is taken off all. So
no count is too high, and none is too low by more than ``error``, at most the stream's (decayed)
accesses over C + 1. Taken instead of a count-min sketch, because a planner must know *which* rows
are hot and that one answers only for rows it is asked about, and overrates the tail; and instead of
space-saving, whose counters are the same but for a shift and which goes id by id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pibroch.errors import ConfigError
from pibroch.planner.profile import AccessProfile, TableCounts

_LARGEST = 1e100


class DecayingSketch:
    """Counts the rows that a stream reads most.

    Args:
        num_rows: by table.
        capacity: counters, C; 24 bytes each, twice that while merging.
        half_life: batches after which an access counts half; ``None`` for ever.

    Raises:
        ConfigError: for no counters, or a half-life that is not positive.
    """

    def __init__(
        self, num_rows: Mapping[str, int], capacity: int, half_life: float | None = None
    ) -> None:
        if capacity < 1 or (half_life is not None and half_life <= 0):
            raise ConfigError(f"capacity {capacity}, half-life {half_life}", "positive ones")
        self.num_rows = dict(num_rows)
        self.capacity = capacity
        sizes = np.fromiter(num_rows.values(), np.int64, len(num_rows))
        self._first = dict(zip(num_rows, np.cumsum(sizes) - sizes, strict=True))
        self._decay = 1.0 if half_life is None else 0.5 ** (1 / half_life)
        self._unit = 1.0  # what an access counts now: it grows, so that older ones need not shrink
        self._rows = np.empty(0, np.int64)
        self._counts = np.empty((0, 2))  # accesses and batches
        self._error = self._samples = self._batches = 0.0

    def add(self, ids: Mapping[str, Sequence[NDArray[np.int64]]], num_samples: int) -> None:
        """Count one batch: by table the ids that it reads; O((V + C) log (V + C)) for V ids."""
        self._unit /= self._decay
        arrays = [array + self._first[name] for name, members in ids.items() for array in members]
        rows, accesses = np.unique(
            np.concatenate(arrays or [np.empty(0, np.int64)]), return_counts=True
        )
        fresh = np.stack([accesses * self._unit, np.full(len(rows), self._unit)], axis=1)
        self._samples += num_samples * self._unit
        self._batches += self._unit
        self._rows, self._counts = _merged(self._rows, self._counts, rows, fresh)
        if len(self._rows) > self.capacity:
            place = len(self._rows) - self.capacity - 1
            least = np.partition(self._counts[:, 0], place)[place]
            kept = self._counts[:, 0] > least
            self._rows = self._rows[kept]
            self._counts = self._counts[kept]
            self._counts[:, 0] -= least
            self._error += least
        if self._unit > _LARGEST:
            for array in (self._counts,):
                array /= self._unit
            self._error, self._samples, self._batches = (
                value / self._unit for value in (self._error, self._samples, self._batches)
            )
            self._unit = 1.0

    @property
    def error(self) -> float:
        """Accesses, as they count now, by which a count may be too low; never too high."""
        return self._error / self._unit

    @property
    def num_counters(self) -> int:
        """That are in use."""
        return len(self._rows)

    def profile(self, batch_size: int, origin: str = "a stream") -> AccessProfile:
        """Counts as they are now, rounded; rows without a counter have none."""
        samples, batches = (
            max(1, round(value / self._unit)) for value in (self._samples, self._batches)
        )
        order = np.argsort(self._rows)
        rows = self._rows[order]
        counts = np.rint(self._counts[order] / self._unit)
        tables = {}
        for name, size in self.num_rows.items():
            start, stop = np.searchsorted(rows, [self._first[name], self._first[name] + size])
            accesses = np.zeros(size, np.int64)
            occurs = np.zeros(size, np.int32)
            in_table = rows[start:stop] - self._first[name]
            accesses[in_table] = counts[start:stop, 0]
            occurs[in_table] = np.minimum(
                np.minimum(counts[start:stop, 1], accesses[in_table]), batches
            )
            tables[name] = TableCounts(accesses, occurs)
        details = {"sketch_capacity": self.capacity, "too_low_by_at_most": self.error}
        return AccessProfile(tables, samples, batches, batch_size, origin, details)


def _merged(
    rows: NDArray[np.int64],
    counts: NDArray[np.float64],
    more: NDArray[np.int64],
    fresh: NDArray[np.float64],
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    together, places = np.unique(np.concatenate([rows, more]), return_inverse=True)
    sums = np.zeros((len(together), 2))
    sums[places[: len(rows)]] = counts
    sums[places[len(rows) :]] += fresh
    return together, sums
