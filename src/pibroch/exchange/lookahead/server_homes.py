"""The part of the oracle's plans that concerns homes on servers.

The communication thread sends records home and receives records and weights.

Some records are *early*: read from servers some steps before a plan moves them, so that a server
may stall for some steps without training waiting for it. A plan names rows that nobody touches
between now and the step for which they are wanted (:attr:`StepPlan.early`): their records are
copied as soon as the server gets to it. When a plan moves one, the copy is taken in place of
asking, and has its bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.futures import Future

from pibroch.collectives import Channel
from pibroch.exchange.lookahead.oracle.kernels.window import Transfer
from pibroch.kernels.arrays import Ints, Records
from pibroch.servers.client import EmbeddingServers, RowsByServer

ROUND_BYTES = 16 << 20
MOST_EARLY_BYTES = 256 << 20
"""Of early records, those on their way included; beyond it rows come when they are moved."""


@dataclass(slots=True)
class _EarlyRequest:
    """Records that were requested early for one step.

    Attributes:
        step: that reads the rows.
        rows: rising addresses.
        answers: with the servers' names, in the order of the rows.
        records: float32 ``[rows, W]``, once the answers are there.
    """

    step: int
    rows: Ints
    answers: Sequence[tuple[str, Future[torch.Tensor]]]
    records: Records | None = None


@dataclass(frozen=True, slots=True)
class EarlyMatches:
    """Which of some rows were requested early.

    Attributes:
        is_early: bool, of each row.
        parts: each request that has some of them, which ones, and their places in it.
    """

    is_early: NDArray[np.bool_]
    parts: list[tuple[_EarlyRequest, Ints, Ints]]


class EarlyRows:
    """One trainer's early records of one lane. The communication thread calls it.

    Args:
        servers: that have the rows.
        steps: between a plan that names rows and the step that reads them, see
            :func:`pibroch.exchange.lookahead.oracle.early_steps`.
    """

    def __init__(self, servers: EmbeddingServers, steps: int) -> None:
        self._servers = servers
        self._steps = steps
        self._requests: deque[_EarlyRequest] = deque()

    def ask(self, step: int, rows: Ints) -> None:
        """Request the rows that a later step reads, and forget those that this step moved.

        Called after the rounds of a step's plan.
        """
        while self._requests and self._requests[0].step <= step + 1:
            self._requests.popleft()
        held = sum(len(each.rows) for each in self._requests) + len(rows)
        if len(rows) and 4 * self._servers.width * held <= MOST_EARLY_BYTES:
            answers = self._servers.read_after(self._servers.rows_by_server(rows))
            self._requests.append(_EarlyRequest(step + self._steps, rows, answers))

    def find(self, rows: Ints) -> EarlyMatches:
        """Which of these rows were requested early."""
        matches = EarlyMatches(np.zeros(len(rows), np.bool_), [])
        for request in self._requests if len(rows) else ():
            places = np.minimum(np.searchsorted(request.rows, rows), len(request.rows) - 1)
            (which,) = np.nonzero(request.rows[places] == rows)
            if len(which):
                matches.is_early[which] = True
                matches.parts.append((request, which, places[which]))
        return matches

    def fill(self, matches: EarlyMatches, out: Records) -> None:
        """Write matching records to their rows of ``out`` ``[rows, .]``; waits for them.

        A narrower ``out`` gets the beginning of each record.
        """
        for request, which, places in matches.parts:
            if request.records is None:
                records = [self._servers.wait(*answer) for answer in request.answers]
                request.records = np.concatenate(records).reshape(
                    len(request.rows), self._servers.width
                )
            out[which] = request.records[places, : out.shape[1]]

    def forget(self) -> None:
        """Forget all copies: from now on rows change in ways that no plan says."""
        self._requests.clear()


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
