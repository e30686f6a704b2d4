"""An export whose rows lie on several hosts: each maps its part, and whoever scores fetches the others' rows.

A lookup fetches the distinct rows of a batch, by one request a host, while it reads its own; then it pools them by the kernels
and in the order of files and positions in which one host would: so that sums have its bits. Deltas lie on every host, whole:
what is fetched is rows of an export alone, which never change.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pibroch.errors import ConfigError, WorkerLostError
from pibroch.exchange.rows import BatchIds
from pibroch.kernels import parallel
from pibroch.kernels.arrays import Ints, Records
from pibroch.serve.export_format import ExportManifest, RowShard
from pibroch.serve.parts import Part, most_ids, request_of
from pibroch.serve.row_files import MappedRows, kernel_arrays

if TYPE_CHECKING:
    from pibroch.serve.row_hosts import RowHost, RowRequest

_HEAD_BYTES = 64 << 10  # of an answer, or a reason in the place of rows


@dataclass(frozen=True, slots=True)
class Split:
    """Where the rows of an export are; by default all here.

    Attributes:
        part: that is here, of the host that this is; none where absent, or all where there are no other hosts.
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

    def needs(self, shard: RowShard, num_rows: int) -> bool:
        """Whether a file has rows that are to be here."""
        held = self.held(num_rows)
        return shard.first_row < held.stop and held.start < shard.first_row + shard.num_rows


class SplitRows(MappedRows):
    """All tables of an export, some of whose rows other hosts hold; as :class:`MappedRows` else.

    Args:
        folder: of the export; files of rows that are elsewhere may be missing.
        manifest: its own.
        sha256: its checksum.
        split: where the rows are.
    """

    def __init__(self, folder: Path, manifest: ExportManifest, sha256: str, split: Split) -> None:
        super().__init__(folder, manifest, split.held(sum(table.num_rows for table in manifest.tables)))
        self._sha256, self._split = sha256, split
        self._parts = [Part(number, len(split.hosts)) for number in range(1, len(split.hosts) + 1)]

    def reach(self) -> None:
        """Fetch a row of each part; raises WorkerLostError."""
        firsts = [rows.start for rows in (part.of(self.num_rows) for part in self._parts) if rows]
        self._fetched(np.array(firsts, np.int64))

    def _pool(self, row_ids: Ints, ids: BatchIds, out_BFD: Records) -> None:
        """Raises WorkerLostError for a host that does not answer, see :data:`row_hosts.ANSWER_TIMEOUT_S`."""
        wanted, places = np.unique(row_ids, return_inverse=True)
        records = self._fetched(wanted)
        places, num_bags = places.astype(np.int64, copy=False).reshape(-1), len(ids.offsets) - 1
        ends = [0, *np.searchsorted(wanted, self._file_ends).tolist()]
        for first, end in pairwise(ends):
            if first < end:
                arrays = kernel_arrays(records[first:end])
                parallel.run(self._add, num_bags, *arrays, first, places, ids.offsets, ids.scale, out_BFD)

    @property
    def _file_ends(self) -> list[int]:
        """The first row behind each file of the export, and behind each delta's."""
        own = [shard.first_row + shard.num_rows for shard in self.manifest.shards]
        return own + [shard.first_row + len(shard.rows) for shard in self._shards if shard.first_row >= self.num_rows]

    def _fetched(self, wanted: Ints) -> NDArray[Any]:
        """Rows ``[U, W]`` by their rising ids: those of other hosts and this one's own."""
        records = self.empty(len(wanted))
        asked: list[tuple[NDArray[Any], RowRequest, RowHost]] = []
        try:
            for part, host, first, end in self._elsewhere(wanted):
                asked.append((records[first:end], self._asked(part, host, wanted[first:end]), host))
            here = self.is_here(wanted)
            records[here] = self.exported(wanted[here])
            while asked:
                rows, request, host = asked.pop()
                found = request.answer()
                if len(found) != rows.nbytes:
                    raise WorkerLostError(host.url, f"it answers {len(found)} bytes in place of {rows.nbytes}")
                rows[:] = np.frombuffer(found, rows.dtype).reshape(rows.shape)
        finally:
            for _, request, _ in asked:
                with suppress(OSError):
                    request.cancel()
        return records

    def _elsewhere(self, wanted: Ints) -> Iterator[tuple[Part, RowHost, int, int]]:
        """Requests to be made: of which part, whom, and the places in ``wanted`` from and to."""
        most = most_ids(self.row_bytes)
        for part, host in zip(self._parts, self._split.hosts, strict=True):
            if part == self._split.part:
                continue
            rows = part.of(self.num_rows)
            first, after = np.searchsorted(wanted, [rows.start, rows.stop]).tolist()
            for begin in range(first, after, most):
                yield part, host, begin, min(begin + most, after)

    def _asked(self, part: Part, host: RowHost, row_ids: Ints) -> RowRequest:
        from pibroch.serve.row_hosts import ANSWER_TIMEOUT_S

        most_bytes = len(row_ids) * self.row_bytes + _HEAD_BYTES
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        return host.ask(part.path, request_of(self._sha256, row_ids), most_bytes, deadline)
