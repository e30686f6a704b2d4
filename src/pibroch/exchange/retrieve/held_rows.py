"""A rank's rows as it reads them for others, and their version.

The version counts how often somebody has begun or ended to write rows from outside. So an odd one
is being written, and rows that were read between two looks at one even number are of one version.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from pibroch.embedding.rows import read_rows
from pibroch.errors import TrainingError
from pibroch.exchange.alltoall.inference import narrowed
from pibroch.exchange.retrieve.lane import RetrieveLane
from pibroch.kernels.arrays import Bytes

LOADER_STARTS_S = 3.0


def whole(version: int) -> int:
    """The version itself, or where it is being written what it will be.

    >>> [whole(version) for version in range(4)]
    [0, 2, 2, 4]
    """
    return version + version % 2


class HeldRows:
    """The rows of this rank, for threads that answer requests; several may call it at once.

    Args:
        timeout_s: how long to wait for a version.

    Attributes:
        lanes: of the rows.
    """

    def __init__(self, timeout_s: float) -> None:
        self.lanes: Sequence[RetrieveLane] = ()
        self._timeout_s = timeout_s
        self._version = 0
        self._changed = threading.Condition()
        self._writer = threading.get_ident()

    @property
    def version(self) -> int:
        """The version in force, odd while rows are written."""
        return self._version

    def advance(self) -> None:
        """Rows are going to be written, or were."""
        with self._changed:
            self._version += 1
            self._writer = threading.get_ident()
            self._changed.notify_all()

    def settled(self, least: int) -> int:
        """Wait for a version that is whole, and at least this one; returns it.

        Raises:
            TrainingError: when it is not there in time. The time is short where the calling thread
                alone has loaded rows so far: it may be the one that has to load them again.
        """
        with self._changed:
            if self._is_settled(least):
                return self._version
            is_own_load = threading.get_ident() == self._writer
            timeout_s = min(LOADER_STARTS_S, self._timeout_s) if is_own_load else self._timeout_s
            if not self._changed.wait_for(lambda: self._is_settled(least), timeout_s):
                raise TrainingError(
                    f"a lookup of rows that others have loaded {least // 2} times, and this rank"
                    f" {self._version // 2} times",
                    "tables that all ranks load equally often",
                    "load them here, too, before lookups or on another thread",
                )
            return self._version

    def answer(
        self, version: int, averaged_at: int | None, rows: Sequence[Bytes]
    ) -> list[Bytes] | int:
        """See :class:`pibroch.exchange.retrieve.gets.Holder`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_settled(version), self._timeout_s):
                raise TrainingError(
                    f"rows that this rank has loaded {self._version // 2} times, where another has"
                    f" loaded its own {version // 2} times",
                    "tables that all ranks load equally often",
                    "load them on all ranks",
                )
            if self._version != version:
                return self._version
            return [
                self._read(lane, part, averaged_at)
                for lane, part in zip(self.lanes, rows, strict=True)
            ]

    def _is_settled(self, least: int) -> bool:
        return self._version >= least and self._version % 2 == 0

    def _read(self, lane: RetrieveLane, part: Bytes, averaged_at: int | None) -> Bytes:
        rows = part.view(lane.id_type).astype(np.int64)
        return narrowed(read_rows(lane.shard, lane.optimizer, rows, averaged_at), lane.wire.dtype)
