"""An export whose rows lie on several hosts.

Each maps its part, and whoever scores fetches the others' rows.

A lookup fetches the rows of a batch, of many ids the distinct ones, by one request a host, while it
reads its own; then it pools them by the kernels and in the order of files and positions in which
one host would: so that sums have its bits. Deltas lie on every host, whole: what is fetched is rows
of an export alone, which never change.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.errors import ConfigError, WorkerLostError
from pibroch.exchange import EmbeddingOutput
from pibroch.kernels.arrays import Ints
from pibroch.serve.parts import Part, most_ids, request_of
from pibroch.serve.row_files import MappedRows, rising
from pibroch.state.export_format import ExportManifest

if TYPE_CHECKING:
    from pibroch.serve.row_hosts import RowHost, RowRequest

_MOST_REASON_BYTES = 4 << 10  # in the place of rows


@dataclass(frozen=True, slots=True)
class RowSplit:
    """Where the rows of an export are; by default all here.

    Attributes:
        part: that is here, of the host that this is; none where absent, or all where there are no
            other hosts.
        hosts: of all parts in their order, this one among them where it holds one.

    Raises:
        ConfigError: for another number of hosts than of parts.
    """

    part: Part | None = None
    hosts: tuple[RowHost, ...] = ()

    def __post_init__(self) -> None:
        if self.part is not None and self.hosts and len(self.hosts) != self.part.count:
            raise ConfigError(
                f"--part {self.part.number}/{self.part.count} with {len(self.hosts)} of --rows-at",
                "the URLs of all parts in their order, this host's own among them",
            )

    @property
    def is_whole(self) -> bool:
        """Whether all rows are here."""
        return self.part is None and not self.hosts

    @property
    def scores(self) -> bool:
        """Whether all rows can be had."""
        return self.part is None or bool(self.hosts)

    @property
    def is_remote(self) -> bool:
        """Whether some rows have to be fetched."""
        return bool(self.hosts)

    def held(self, num_rows: int) -> range:
        """The rows that are here."""
        if self.part is not None:
            return self.part.of(num_rows)
        return range(0 if self.hosts else num_rows)


class RowsAsked:
    """Rows of a batch, some of which are on their way from other hosts.

    Args:
        records: ``[U, W]`` by rising row ids: where rows are put that come, beside those that are
            here.

    Attributes:
        then: what is made of them when all are there.
    """

    def __init__(self, records: NDArray[Any]) -> None:
        self._records = records
        self.then: Callable[[NDArray[Any]], Tensor | EmbeddingOutput] = torch.from_numpy
        self._open: list[tuple[RowRequest, int, int, str]] = []

    @property
    def requests(self) -> list[RowRequest]:
        """For rows that are elsewhere, whose answers nobody has taken yet."""
        return [request for request, *_ in self._open]

    def add(self, request: RowRequest, first: int, end: int, url: str) -> None:
        """For the rows from and to these places."""
        self._open.append((request, first, end, url))

    def __call__(self) -> Tensor | EmbeddingOutput:
        """What is made of them; blocks until all are there, or raises WorkerLostError."""
        try:
            while self._open:
                request, first, end, url = self._open.pop()
                answer = request.answer()
                rows = self._records[first:end]
                if len(answer) != rows.nbytes:
                    raise WorkerLostError(
                        url, f"it answers {len(answer)} bytes in place of {rows.nbytes}"
                    )
                rows[:] = np.frombuffer(answer, rows.dtype).reshape(rows.shape)
        except BaseException:
            self.cancel()
            raise
        return self.then(self._records)

    def cancel(self) -> None:
        """Nobody wants them any more."""
        for request in self.requests:
            with suppress(OSError):
                request.cancel()


class SplitRows(MappedRows):
    """All tables of an export, some of whose rows other hosts hold; as :class:`MappedRows` else.

    Args:
        folder: of the export; files of rows that are elsewhere may be missing.
        manifest: its own.
        sha256: its checksum.
        split: where the rows are.
    """

    def __init__(
        self, folder: Path, manifest: ExportManifest, sha256: str, split: RowSplit
    ) -> None:
        super().__init__(
            folder, manifest, split.held(sum(table.num_rows for table in manifest.tables))
        )
        self._sha256 = sha256
        self._split = split
        self._parts = [Part(number, len(split.hosts)) for number in range(1, len(split.hosts) + 1)]
        self._part_bounds = np.array(
            [*(part.of(self.num_rows).start for part in self._parts), self.num_rows]
        )

    def reach(self) -> None:
        """Fetch a row of each part; raises WorkerLostError."""
        firsts = [rows.start for rows in (part.of(self.num_rows) for part in self._parts) if rows]
        self._asked(np.array(firsts, np.int64), waits=True)()

    def __call__(self, batch: JaggedBatch) -> Tensor | EmbeddingOutput:
        """Raise WorkerLostError for a host without an answer in time.

        See :data:`row_hosts.ANSWER_TIMEOUT_S`.
        """
        return self.ask(batch)()

    def ask(self, batch: JaggedBatch, waits: bool = True) -> RowsAsked:
        """Send requests for the rows that are elsewhere, and read those that are here meanwhile.

        Args:
            batch: as a call takes it.
            waits: for a connection where none is open.

        Returns:
            What gives embeddings, as a call does.

        Raises:
            BlockingIOError: for what cannot be sent without waiting.
            WorkerLostError: where a host is known to be lost.
        """
        ids = self._resolved(batch)
        rows, places = rising(ids.row_ids)
        newest = rows
        order: Ints | None = None
        if self._changes is not None:
            newest = self._changes.redirect(rows)
            order = newest.argsort()
            newest = newest[order]
        requested = self._asked(newest, waits)

        def pooled(records: NDArray[Any]) -> Tensor | EmbeddingOutput:
            if order is not None:
                arrived = records
                records = np.empty_like(arrived)
                records[order] = arrived
            return self._pooled(records, rows, places, ids)

        requested.then = pooled
        return requested

    def _asked(self, wanted: Ints, waits: bool) -> RowsAsked:
        """Rows by rising ids.

        Those of other hosts are on their way, this one's own and those of deltas are there.
        """
        records = self.empty(len(wanted))
        most = most_ids(self.row_bytes)
        requested = RowsAsked(records)
        bounds = wanted.searchsorted(self._part_bounds).tolist()
        here = [(bounds[-1], len(wanted))]
        try:
            for part, host, (first, end) in zip(
                self._parts, self._split.hosts, pairwise(bounds), strict=True
            ):
                if part == self._split.part:
                    here.append((first, end))
                    continue
                for begin in range(first, end, most):
                    some = wanted[begin : min(begin + most, end)]
                    requested.add(
                        self._request(part, host, some, waits), begin, begin + len(some), host.url
                    )
            for first, end in here:
                if first < end:
                    records[first:end] = self.exported(wanted[first:end])
        except BaseException:
            requested.cancel()
            raise
        return requested

    def _request(self, part: Part, host: RowHost, row_ids: Ints, waits: bool) -> RowRequest:
        from pibroch.serve.row_hosts import ANSWER_TIMEOUT_S

        most_bytes = len(row_ids) * self.row_bytes + _MOST_REASON_BYTES
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        return host.ask(part.path, request_of(self._sha256, row_ids), most_bytes, deadline, waits)
