"""Which line of which source each sample stood in, as runs of lines that follow each other.

Sources without malformed or blank lines, or records of several lines, are one run each, so that
this takes next to no room. K runs, R samples.

>>> runs = np.array([[0, 0, 2], [3, 0, 6], [5, 1, 2]])
>>> places_of(runs, 1, 6).tolist()
[[0, 3], [0, 4], [0, 6], [0, 7], [1, 2]]
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pibroch.data.storage import ArrayFile

WIDTH = 3
"""Of a run: its first sample, the number of its source, and that sample's line there."""
_BLOCK_RUNS = 1 << 16
Places = NDArray[np.int64]
"""Of samples ``[R, 2]``: numbers of their sources, and their lines there."""


def places_of(runs: NDArray[np.int64], first: int, end: int) -> Places:
    """Where samples ``first`` to ``end`` stood, by the runs ``[K, 3]`` of a split."""
    samples = np.arange(first, end)
    of = runs[np.searchsorted(runs[:, 0], samples, side="right") - 1]
    return np.stack([of[:, 1], of[:, 2] + samples - of[:, 0]], 1)


class LineRuns:
    """The runs of a split, as they are written.

    Args:
        file: of the runs.
        count: of those that are there.
    """

    def __init__(self, file: ArrayFile, count: int) -> None:
        self._file = file
        self.count = count

    def append(self, first: int, places: Places) -> None:
        """Add samples ``first`` and so on, which follow those that are there."""
        if not len(places):
            return
        starts = np.ones(len(places), np.bool_)
        starts[1:] = (np.diff(places, axis=0) != (0, 1)).any(1)
        if self.count:
            (last,) = self._read(self.count - 1, 1)
            follows = last[1], last[2] + first - last[0]
            starts[0] = tuple(places[0]) != follows
        at = np.flatnonzero(starts)
        self._add(np.column_stack([first + at, places[at]]))

    def move(self, first: int, end: int, target: LineRuns) -> None:
        """Add the runs of samples ``first`` to ``end`` to another split, where they are the first.

        Here they stay until :meth:`cut`.
        """
        assert not target.count, "runs of its own"
        for begin in range(0, self.count if first < end else 0, _BLOCK_RUNS):
            runs = self._read(begin, min(_BLOCK_RUNS + 1, self.count - begin))
            ends = np.append(runs[1:, 0], end)[:_BLOCK_RUNS]
            runs = runs[:_BLOCK_RUNS]
            some = runs[(ends > first) & (runs[:, 0] < end)]
            skipped = np.maximum(first - some[:, 0], 0)
            some[:, 2] += skipped
            some[:, 0] += skipped - first
            target._add(some)

    def cut(self, num_samples: int) -> None:
        """Leave the first samples alone."""
        self.count = sum(
            int((self._read(begin, min(_BLOCK_RUNS, self.count - begin))[:, 0] < num_samples).sum())
            for begin in range(0, self.count, _BLOCK_RUNS)
        )

    def _read(self, first: int, count: int) -> NDArray[np.int64]:
        return self._file.read_at(first * WIDTH, count * WIDTH).reshape(count, WIDTH)

    def _add(self, runs: NDArray[np.int64]) -> None:
        self._file.write_at(self.count * WIDTH, runs)
        self.count += len(runs)
