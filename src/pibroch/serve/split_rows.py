"""An export whose rows lie on several hosts.

Each maps its part, and whoever scores fetches the others' rows.

A lookup fetches the rows of a batch, of many ids the distinct ones, by one request a host, while it
reads its own; then it pools them by the kernels and in the order of files and positions in which
one host would: so that sums have its bits. Deltas lie on every host, whole: what is fetched is rows
of an export alone, which never change.
"""

from __future__ import annotations

from collections.abc import Callable
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
from pibroch.serve.parts import ANSWER_TIMEOUT_S, Part, most_ids
from pibroch.serve.row_files import MappedRows, rising
from pibroch.state.export_format import ExportManifest

if TYPE_CHECKING:
    from pibroch.rpc.rows import Reading, RowWorker
    from pibroch.serve.row_hosts import RowHost

    _Asked = tuple[Reading, int, int, str]


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
                f"--part {self.part} with {len(self.hosts)} of --rows-at",
                "the addresses of all parts in their order, this host's own among them",
            )

    @property
    def workers(self) -> tuple[RowWorker, ...]:
        """By which this process reads of the hosts."""
        return tuple(dict.fromkeys(host.worker for host in self.hosts))

    @property
    def is_whole(self) -> bool:
        """Whether all rows are here."""
        return self.part is None and not self.hosts

    @property
    def scores(self) -> bool:
        """Whether all rows can be had."""
        return self.part is None or bool(self.hosts)

    def held(self, num_rows: int) -> range:
        """The rows that are here."""
        if self.part is not None:
            return self.part.of(num_rows)
        return range(0 if self.hosts else num_rows)


@dataclass(frozen=True, slots=True)
class RowsAsked:
    """Rows of a batch, some of which are on their way from other hosts.

    Attributes:
        records: ``[U, W]`` by rising row ids: where rows are put that come, beside those that are
            here.
        asked: answers that nobody has taken yet, for the rows from and to which places, and hosts.
        then: what is made of the records when all are there.
    """

    records: NDArray[Any]
    asked: list[_Asked]
    then: Callable[[NDArray[Any]], Tensor | EmbeddingOutput]

    @property
    def answers(self) -> list[Reading]:
        """With rows that are elsewhere, which nobody has taken yet."""
        return [answer for answer, *_ in self.asked]

    def __call__(self) -> Tensor | EmbeddingOutput:
        """What is made of them; blocks until all are there, or raises WorkerLostError."""
        while self.asked:
            answer, first, end, host = self.asked.pop()
            try:
                given = answer.result(2 * ANSWER_TIMEOUT_S)
            except TimeoutError as error:  # this process did not get to look at the clock
                raise WorkerLostError(host, "no answer in time") from error
            rows = self.records[first:end]
            if len(given) != rows.nbytes:
                raise WorkerLostError(
                    host, f"it answers {len(given)} bytes in place of {rows.nbytes}"
                )
            rows[:] = given.view(rows.dtype).reshape(rows.shape)
        return self.then(self.records)


class SplitRows(MappedRows):
    """All tables of an export, some of whose rows other hosts hold; as :class:`MappedRows` else.

    Args:
        folder: of the export; files of rows that are elsewhere may be missing.
        manifest: its own.
        held: of the rows, those that are here.
        sha256: its checksum.
        split: where the rows are.
    """

    def __init__(
        self, folder: Path, manifest: ExportManifest, held: range, sha256: str, split: RowSplit
    ) -> None:
        super().__init__(folder, manifest, held)
        self._split = split
        self._sha256 = sha256
        self._parts = [Part(number, len(split.hosts)) for number in range(1, len(split.hosts) + 1)]
        self._part_bounds = np.array(
            [*(part.of(self.num_rows).start for part in self._parts), self.num_rows]
        )

    def reach(self) -> None:
        """Fetch a row of each part; raises WorkerLostError."""
        firsts = [rows.start for rows in (part.of(self.num_rows) for part in self._parts) if rows]
        RowsAsked(*self._asked(np.array(firsts, np.int64)), torch.from_numpy)()

    def __call__(self, batch: JaggedBatch) -> Tensor | EmbeddingOutput:
        """Raise WorkerLostError for a host without an answer in time.

        See :data:`row_hosts.ANSWER_TIMEOUT_S`.
        """
        return self.ask(batch)()

    def ask(self, batch: JaggedBatch) -> RowsAsked:
        """Send requests for the rows that are elsewhere, and read those that are here meanwhile.

        Waits for nothing. Returns what gives embeddings, as a call does.
        """
        ids = self._resolved(batch)
        rows, places = rising(ids.row_ids)
        if self._changes is None:
            return RowsAsked(*self._asked(rows), self._pooling(rows, places, ids))
        newest = self._changes.redirect(rows)
        order = newest.argsort()
        records, asked = self._asked(newest[order])
        pooled = self._pooling(rows, places, ids)

        def reordered(arrived: NDArray[Any]) -> Tensor | EmbeddingOutput:
            records = np.empty_like(arrived)
            records[order] = arrived
            return pooled(records)

        return RowsAsked(records, asked, reordered)

    def _asked(self, wanted: Ints) -> tuple[NDArray[Any], list[_Asked]]:
        """Room for rows by rising ids, and the answers that fill it.

        Those of other hosts are on their way, this one's own and those of deltas are there.
        """
        records = self.empty(len(wanted))
        asked: list[_Asked] = []
        most = most_ids(self.row_bytes)
        bounds = wanted.searchsorted(self._part_bounds).tolist()
        here = [(bounds[-1], len(wanted))]
        for part, host, (first, end) in zip(
            self._parts, self._split.hosts, pairwise(bounds), strict=True
        ):
            if part == self._split.part:
                here.append((first, end))
                continue
            for begin in range(first, end, most):
                some = wanted[begin : min(begin + most, end)]
                answer = host.read(self._sha256, some)
                asked.append((answer, begin, begin + len(some), host.address))
        for first, end in here:
            if first < end:
                records[first:end] = self.exported(wanted[first:end])
        return records, asked
