"""Which rows of a shard were updated, for each of those who want to know.

An incremental checkpoint wants the rows since the one before, a checkpoint beside training those
since its own predecessor, and so on: each has marks of its own, by name, which it alone clears.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.arrays import Ints

SAVED = "saved"
"""Rows since the run's last own checkpoint, see :mod:`pibroch.state.checkpoint_folder`."""
TIMED = "timed"
"""Since the last checkpoint beside training, see :mod:`pibroch.train.timed_checkpoints`."""
PUBLISHED = "published"
"""Since the last version that training published, see :mod:`pibroch.train.publishing`."""
MEMORY = "memory"
"""Since the last cut in memory, see :mod:`pibroch.state.kept_rows`."""


class RowMarks:
    """Marks by name over the rows of a shard.

    A cut takes the rows marked under a name and clears them; until it ends they may yet come back.

    >>> marks = RowMarks(num_rows=3, num_places=5)
    >>> marks.start("saved")
    >>> marks.mark(np.array([1, 4]))
    >>> marks.cut("saved", marks.rows("saved"))
    >>> marks.mark(np.array([2]))
    >>> marks.end_cut("saved", is_saved=False)
    >>> marks.rows("saved").tolist()
    [1, 2]

    Args:
        num_rows: of the shard.
        num_places: rows, and room behind them whose marks nobody asks for.
    """

    def __init__(self, num_rows: int, num_places: int) -> None:
        self._num_rows = num_rows
        self._num_places = num_places
        self._named: dict[str, NDArray[np.bool_]] = {}
        self._all: tuple[NDArray[np.bool_], ...] = ()  # of these, as mark() wants them
        self._cut: dict[str, Ints] = {}

    @property
    def names(self) -> Sequence[str]:
        """Under which rows are marked."""
        return list(self._named)

    def __contains__(self, name: str) -> bool:
        return name in self._named

    def start(self, name: str) -> None:
        """Mark rows from now on, as if none had been updated before."""
        self._named[name] = np.zeros(self._num_places, np.bool_)
        self._all = tuple(self._named.values())
        self._cut.pop(name, None)

    def mark(self, rows: Ints) -> None:
        """Say that rows were updated."""
        for marks in self._all:
            marks[rows] = True

    def of(self, name: str) -> NDArray[np.bool_]:
        """Bool ``[num_rows]``; writing to it changes the marks."""
        return self._named[name][: self._num_rows]

    def rows(self, name: str) -> Ints:
        """Marked rows, rising. Takes a look at all."""
        return np.flatnonzero(self.of(name))

    def clear(self, name: str, rows: Ints) -> None:
        """As if rows had not been updated."""
        self._named[name][rows] = False

    def set_all(self, name: str) -> None:
        """As if all rows had been updated."""
        self._named[name][:] = True

    def cut(self, name: str, rows: Ints) -> None:
        """Clear rows that somebody has copied, until :meth:`end_cut` says what became of them."""
        self.clear(name, rows)
        self._cut[name] = rows

    def unsaved(self, name: str) -> Ints:
        """Rows of the last cut that may yet turn out not to be saved."""
        return self._cut.get(name, np.empty(0, np.int64))

    def end_cut(self, name: str, is_saved: bool) -> None:
        """The rows of the last cut were saved, or count as updated since the one before."""
        rows = self._cut.pop(name, None)
        if rows is not None and not is_saved:
            self._named[name][rows] = True
