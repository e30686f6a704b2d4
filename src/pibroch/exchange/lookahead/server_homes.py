"""The part of the oracle's plans that concerns homes on servers.

The communication thread sends records home and receives records and weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.futures import Future

from pibroch.collectives import Channel
from pibroch.exchange.lookahead.early_rows import EarlyMatches, EarlyRows
from pibroch.kernels.arrays import Ints, Records
from pibroch.kernels.window import Transfer
from pibroch.servers.client import EmbeddingServers, RowsByServer

ROUND_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class PendingRows:
    """Rows that were requested of servers, which have not sent them.

    Attributes:
        answers: of the servers.
        counts: records, and weights, of each server, ``[2, S]``.
        early: which of the records, and of the weights, were requested early.
    """

    answers: Sequence[Future[torch.Tensor]]
    counts: Ints
    early: tuple[EarlyMatches, EarlyMatches]


class ServerHomes:
    """One trainer's way to homes on servers; every trainer makes the same calls in the same order.

    Args:
        servers: that hold the homes.
        channel: between the trainers.
        early_steps: see :class:`EarlyRows`.
    """

    def __init__(self, servers: EmbeddingServers, channel: Channel, early_steps: int) -> None:
        self._servers = servers
        self._channel = channel
        self._num_ranks = channel.ranks.world_size
        self.early = EarlyRows(servers, early_steps)

    def begin(self, transfer: Transfer, leaving: Ints, records: Records) -> PendingRows:
        """Send what goes to servers and ask for what comes; returns what :meth:`collect` waits for.

        Args:
            transfer: of a step.
            leaving: rows that go to servers, grouped by server.
            records: of these rows, flat.
        """
        begins = transfer.counts[:, : self._num_ranks].sum(1)
        counts = transfer.counts[:, self._num_ranks :]
        rows = transfer.rows_in[begins[2] :], transfer.borrowed_rows_in[begins[3] :]
        # a record begins with its weights, but those sent alone may be of another type
        may_be_early = rows[1] if self._servers.is_float32 else rows[1][:0]
        matches = self.early.find(rows[0]), self.early.find(may_be_early)
        whole, borrowed = (
            _less(RowsByServer(of_kind, counts[kind]), early)
            for kind, (of_kind, early) in enumerate(zip(rows, matches, strict=True), 2)
        )
        answers = self._servers.exchange(RowsByServer(leaving, counts[0]), records, whole, borrowed)
        return PendingRows(answers, counts[2:], matches)

    def collect(self, pending: PendingRows, out: Records) -> None:
        """Wait for pending rows, flat in ``out``: for each server its records, then its weights."""
        widths = np.array([self._servers.width, self._servers.dim])
        if not any(matches.parts for matches in pending.early):
            self._servers.collect(pending.answers, (widths @ pending.counts).tolist(), out)
            return
        kinds = [
            np.empty((count, width), np.float32)
            for count, width in zip(pending.counts.sum(1), widths, strict=True)
        ]
        late = [
            np.flatnonzero(~_padded(matches.is_early, len(rows)))
            for matches, rows in zip(pending.early, kinds, strict=True)
        ]
        ends = np.cumsum(np.c_[[0, 0], pending.counts], 1)
        parts = [
            np.split(places, np.searchsorted(places, bounds[1:-1]))
            for places, bounds in zip(late, ends, strict=True)
        ]
        sizes = [
            int(len(whole) * widths[0] + len(borrowed) * widths[1])
            for whole, borrowed in zip(*parts, strict=True)
        ]
        received = np.empty(sum(sizes), np.float32)
        at = 0
        self._servers.collect(pending.answers, sizes, received)
        for of_server in zip(*parts, strict=True):
            for rows, places in zip(kinds, of_server, strict=True):
                size = len(places) * rows.shape[1]
                rows[places] = received[at : at + size].reshape(len(places), rows.shape[1])
                at += size
        for matches, rows in zip(pending.early, kinds, strict=True):
            self.early.fill(matches, rows)
        at = 0
        for server in range(pending.counts.shape[1]):
            for rows, bounds in zip(kinds, ends, strict=True):
                part = rows[bounds[server] : bounds[server + 1]].reshape(-1)
                out[at : at + len(part)] = part
                at += len(part)

    def num_bytes(self, transfer: Transfer, widths: Ints) -> int:
        """Bytes between this trainer and servers, both ways.

        ``widths`` are the floats of a record and of its weights.
        """
        counts = transfer.counts[:, self._num_ranks :]
        floats = 4 * int((widths @ (counts[:2] + counts[2:])).sum())
        return floats + self._servers.num_row_bytes(int(counts.sum()))

    def write(self, rows: Ints, records: Records, slots: Ints) -> int:
        """Write records home, in as many rounds as the fullest cache needs; returns their bytes.

        Servers keep a round in memory until all ranks' part is there.

        Args:
            rows: rising addresses.
            records: ``[places, W]``.
            slots: where each row's record is among them.
        """
        servers = self._servers
        row_bytes = int(4 * records.shape[1])
        rows_per_round = max(1, ROUND_BYTES // row_bytes)
        rounds: list[int] = self._channel.gather(-(-len(rows) // rows_per_round))
        num_rounds = max(rounds)
        for first in range(0, num_rounds * rows_per_round, rows_per_round):
            part = slice(first, first + rows_per_round)
            nothing = servers.no_rows()
            servers.exchange(
                servers.rows_by_server(rows[part]), records[slots[part]].ravel(), nothing, nothing
            )
        return row_bytes * len(rows) + servers.num_row_bytes(len(rows))

    def flush(self) -> None:
        """See :meth:`EmbeddingServers.flush`."""
        self._servers.flush()


def _less(rows: RowsByServer, early: EarlyMatches) -> RowsByServer:
    """The rows that were not requested early."""
    if not early.parts:
        return rows
    server = np.repeat(np.arange(len(rows.counts)), rows.counts)[~early.is_early]
    return RowsByServer(rows.rows[~early.is_early], np.bincount(server, minlength=len(rows.counts)))


def _padded(is_early: NDArray[np.bool_], size: int) -> NDArray[np.bool_]:
    """One mark for each row, also where none was looked for."""
    return is_early if len(is_early) == size else np.zeros(size, np.bool_)
