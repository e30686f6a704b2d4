"""The part of the oracle's plans that concerns homes on servers.

Records that go there, records and weights that come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.futures import Future

from pibroch.collectives import Channel
from pibroch.exchange.lookahead.early_rows import EarlyRows, FoundEarly
from pibroch.kernels.arrays import Ints, Records
from pibroch.kernels.window import Transfer
from pibroch.servers.client import EmbeddingServers, RowsByServer

ROUND_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Coming:
    """What comes from servers in a message.

    Attributes:
        answers: of the servers.
        counts: records, and weights, of each, ``[2, S]``.
        found: those of them that were asked for before.
    """

    answers: Sequence[Future[torch.Tensor]]
    counts: Ints
    found: tuple[FoundEarly, FoundEarly]


class ServerHomes:
    """One trainer's way to them; every trainer makes the same calls in the same order.

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

    def begin(self, transfer: Transfer, leaving: Ints, records: Records) -> Coming:
        """Send what goes to servers and ask for what comes; returns what :meth:`collect` waits for.

        Args:
            transfer: of a step.
            leaving: rows that go to servers, grouped by server.
            records: theirs, flat.
        """
        first = transfer.counts[:, : self._num_ranks].sum(1)
        counts = transfer.counts[:, self._num_ranks :]
        rows = transfer.rows_in[first[2] :], transfer.lent_in[first[3] :]
        begins_so = (
            self._servers.is_float32
        )  # else weights alone travel in another type than in records
        found = self.early.find(rows[0]), self.early.find(rows[1] if begins_so else rows[1][:0])
        whole, lent = (
            _less(RowsByServer(of_kind, counts[kind]), early)
            for kind, (of_kind, early) in enumerate(zip(rows, found, strict=True), 2)
        )
        answers = self._servers.exchange(RowsByServer(leaving, counts[0]), records, whole, lent)
        return Coming(answers, counts[2:], found)

    def collect(self, coming: Coming, out: Records) -> None:
        """Wait for what is wanted: for each server in turn its records, then its weights, flat in ``out``."""
        widths = np.array([self._servers.width, self._servers.dim])
        if not any(found.parts for found in coming.found):
            self._servers.collect(coming.answers, (widths @ coming.counts).tolist(), out)
            return
        kinds = [
            np.empty((count, width), np.float32)
            for count, width in zip(coming.counts.sum(1), widths, strict=True)
        ]
        asked = [
            np.flatnonzero(~_padded(found.is_early, len(rows)))
            for found, rows in zip(coming.found, kinds, strict=True)
        ]
        ends = np.cumsum(np.c_[[0, 0], coming.counts], 1)
        parts = [
            np.split(places, np.searchsorted(places, bounds[1:-1]))
            for places, bounds in zip(asked, ends, strict=True)
        ]
        sizes = [
            int(len(whole) * widths[0] + len(lent) * widths[1])
            for whole, lent in zip(*parts, strict=True)
        ]
        came = np.empty(sum(sizes), np.float32)
        at = 0
        self._servers.collect(coming.answers, sizes, came)
        for of_server in zip(*parts, strict=True):
            for rows, places in zip(kinds, of_server, strict=True):
                size = len(places) * rows.shape[1]
                rows[places] = came[at : at + size].reshape(len(places), rows.shape[1])
                at += size
        for found, rows in zip(coming.found, kinds, strict=True):
            self.early.fill(found, rows)
        at = 0
        for server in range(coming.counts.shape[1]):
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


def _less(rows: RowsByServer, early: FoundEarly) -> RowsByServer:
    """Those that were not asked for before."""
    if not early.parts:
        return rows
    server = np.repeat(np.arange(len(rows.counts)), rows.counts)[~early.is_early]
    return RowsByServer(rows.rows[~early.is_early], np.bincount(server, minlength=len(rows.counts)))


def _padded(is_early: NDArray[np.bool_], size: int) -> NDArray[np.bool_]:
    """Of all rows, where none was looked for."""
    return is_early if len(is_early) == size else np.zeros(size, np.bool_)
