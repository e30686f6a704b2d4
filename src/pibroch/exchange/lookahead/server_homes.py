"""The part of the oracle's plans that concerns homes on servers: records that go there, records and weights that come."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.futures import Future

from pibroch.collectives import Channel
from pibroch.kernels.arrays import Ints, Records
from pibroch.kernels.window.rules import Transfer
from pibroch.servers.client import EmbeddingServers, RowsByServer

ROUND_BYTES = 16 << 20


class ServerHomes:
    """One trainer's way to them; every trainer makes the same calls in the same order.

    Args:
        servers: that hold the homes.
        channel: between the trainers.
    """

    def __init__(self, servers: EmbeddingServers, channel: Channel) -> None:
        self._servers, self._channel, self._num_ranks = servers, channel, channel.ranks.world_size

    def begin(self, transfer: Transfer, leaving: Ints, records: Records) -> Sequence[Future[torch.Tensor]]:
        """Send what goes to servers and ask for what comes; returns what :meth:`collect` waits for.

        Args:
            transfer: of a step.
            leaving: rows that go to servers, grouped by server.
            records: theirs, flat.
        """
        first, counts = transfer.counts[:, : self._num_ranks].sum(1), transfer.counts[:, self._num_ranks :]
        whole = RowsByServer(transfer.rows_in[first[2] :], counts[2])
        lent = RowsByServer(transfer.lent_in[first[3] :], counts[3])
        return self._servers.exchange(RowsByServer(leaving, counts[0]), records, whole, lent)

    def collect(self, answers: Sequence[Future[torch.Tensor]], sizes: Sequence[int], out: Records) -> None:
        """See :meth:`EmbeddingServers.collect`."""
        self._servers.collect(answers, sizes, out)

    def num_bytes(self, transfer: Transfer, widths: Ints) -> int:
        """Bytes between this trainer and servers, both ways; ``widths`` are the floats of a record and of its weights."""
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
        servers, row_bytes = self._servers, int(4 * records.shape[1])
        rows_per_round = max(1, ROUND_BYTES // row_bytes)
        rounds: list[int] = self._channel.gather(-(-len(rows) // rows_per_round))
        num_rounds = max(rounds)
        for first in range(0, num_rounds * rows_per_round, rows_per_round):
            part = slice(first, first + rows_per_round)
            nothing = servers.no_rows()
            servers.exchange(servers.rows_by_server(rows[part]), records[slots[part]].ravel(), nothing, nothing)
        return row_bytes * len(rows) + servers.num_row_bytes(len(rows))

    def flush(self) -> None:
        """See :meth:`EmbeddingServers.flush`."""
        self._servers.flush()
