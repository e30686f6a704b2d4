"""A trainer's way to the rows on embedding servers.

R rows of one server, W floats in a record, D of them weights, S servers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import TypeVar

import numpy as np
import torch

from pibroch.collectives import Channel
from pibroch.embedding import Piece, SparseOptimizer
from pibroch.embedding.dtype import Dtype
from pibroch.kernels.arrays import Ints, Records
from pibroch.servers import server
from pibroch.servers.spec import ShardSpec, listed_rows
from pibroch.servers.workers import ServingWorkers

T = TypeVar("T")
Awaited = torch.futures.Future[torch.Tensor] | torch.futures.Future[None]
MOST_UNANSWERED = 64
"""Rounds that may be under way: those of a second in which a server says nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class RowsByServer:
    """What goes to the servers, or is wanted of them, grouped by server.

    Attributes:
        rows: addresses.
        counts: ``[S]``.
    """

    rows: Ints
    counts: Ints

    def split(self) -> list[Ints]:
        """By server."""
        return np.split(self.rows, np.cumsum(self.counts)[:-1])


class EmbeddingServers:
    """The servers' shards, as one exchange of one trainer knows them.

    All trainers make the same calls in the same order.

    One thread calls it at a time.

    Args:
        names: of the servers, workers of this process's RPC group.
        pieces: that each server holds.
        bounds: int64 ``[S + 1]``, first address of each server's rows.
        dim: D.
        dtype: of the weights in the servers' memory; alone they travel as float32.
        optimizer: of all rows.
        seed: of the initial weights; ``None`` where somebody writes all rows.
        channel: between the trainers, to agree on a name.

    Raises:
        ConfigError: when trainers want different things.
        TrainingError: when a server cannot be reached.
    """

    def __init__(
        self,
        names: Sequence[str],
        pieces: Sequence[Sequence[Piece]],
        bounds: Ints,
        dim: int,
        dtype: Dtype,
        optimizer: SparseOptimizer,
        seed: int | None,
        channel: Channel,
    ) -> None:
        self.is_float32 = dtype == "float32"
        self.names = tuple(names)
        self.bounds = bounds
        self.dim = dim
        self.width = optimizer.record_width(dim, dtype)
        self._ranks = channel.ranks
        self._workers = ServingWorkers("embedding server", names, channel)
        self._number = 0
        self._unanswered: deque[tuple[str, Awaited]] = deque()
        largest = int(np.diff(bounds).max())
        self.row_type = np.dtype(np.int32 if largest < 1 << 31 else np.int64)
        for name, held in zip(self.names, pieces, strict=True):
            spec = list(astuple(ShardSpec.of(held, optimizer, seed, dtype)))
            wanted = [spec, dim, channel.ranks.world_size]
            self._unanswered.append(
                (name, self._workers.configure(name, server.configure, wanted, listed_rows(held)))
            )
        self._wait(0)

    def exchange(
        self,
        home: RowsByServer,
        records: Records,
        whole: RowsByServer,
        borrowed: RowsByServer,
        averaged_at: int | None = None,
    ) -> list[torch.futures.Future[torch.Tensor]]:
        """A round: records go home, then records and weights are wanted.

        Returns what :meth:`collect` waits for.

        Args:
            home: rows that go home.
            records: float32 ``[len(home.rows) * W]``; not changed until the round is over.
            whole: rows of which the record is wanted.
            borrowed: rows of which the weights are wanted.
            averaged_at: wants moving averages as of this step for weights.
        """
        floats = np.split(records, np.cumsum(home.counts)[:-1] * self.width)
        split = zip(home.split(), whole.split(), borrowed.split(), strict=True)
        answers = []
        for number, (name, of_server) in enumerate(zip(self.names, split, strict=True)):
            rows = [self._local(each, number) for each in of_server]
            parts = [rows[0], torch.from_numpy(floats[number]), *rows[1:]]
            answers.append(self._send(name, server.exchange, *parts, averaged_at))
        self._number += 1
        coming = 4 * (self.width * int(whole.counts.sum()) + self.dim * int(borrowed.counts.sum()))
        self._count(
            records.nbytes
            + coming
            + self.num_row_bytes(sum(len(each.rows) for each in (home, whole, borrowed)))
        )
        return answers

    def collect(
        self,
        answers: Sequence[torch.futures.Future[torch.Tensor]],
        sizes: Sequence[int],
        out: Records,
    ) -> None:
        """Wait for what is wanted in a round.

        For each server in turn its records, then its weights, flat in ``out``.

        Args:
            answers: of the servers.
            sizes: floats wanted of each; one of whom nothing is wanted is not waited for.
            out: as long as all of it.
        """
        at = 0
        for name, answer, size in zip(self.names, answers, sizes, strict=True):
            if size:
                out[at : at + size] = self.wait(name, answer)
                at += size

    def read_after(
        self, rows: RowsByServer
    ) -> list[tuple[str, torch.futures.Future[torch.Tensor]]]:
        """Ask for records of rows as they are after the rounds so far.

        No later round is about them before they are here.

        Returns at once, with each server's answer by its name, flat; those of whom nothing is
        wanted are left out.
        """
        answers = []
        for number, (name, wanted) in enumerate(zip(self.names, rows.split(), strict=True)):
            if len(wanted):
                how = self._number - 1, self._local(wanted, number)
                answers.append((name, self._workers.call(name, server.read_after, *how)))
        self._count(4 * self.width * len(rows.rows) + self.num_row_bytes(len(rows.rows)))
        return answers

    def wait(self, name: str, answer: torch.futures.Future[torch.Tensor]) -> Records:
        """A server's answer.

        Raises:
            TrainingError: when it cannot be reached.
        """
        with self._workers.explained(name):
            numbers: Records = answer.wait().numpy()
        return numbers

    def update(
        self, updated: RowsByServer, gradients: Records, learning_rate: float, step: int
    ) -> None:
        """A round of gradients ``[len(updated.rows), D]``; returns when it is on its way."""
        sums = np.split(gradients, np.cumsum(updated.counts)[:-1])
        for number, (name, rows) in enumerate(zip(self.names, updated.split(), strict=True)):
            given = torch.from_numpy(sums[number])
            self._send(name, server.update, self._local(rows, number), given, learning_rate, step)
        self._number += 1
        self._count(gradients.nbytes + self.num_row_bytes(len(updated.rows)))

    def flush(self) -> None:
        """Wait until all rounds are over, those of other trainers too: every trainer calls it."""
        self._wait(0)

    def ask(self, number: int, function: Callable[..., T], *args: object) -> T:
        """What a function says on a server, outside of rounds."""
        return self._workers.ask(self.names[number], function, *args)

    def rows_by_server(self, rows: Ints) -> RowsByServer:
        """Rising addresses by server."""
        return RowsByServer(rows, np.diff(np.searchsorted(rows, self.bounds)))

    def no_rows(self) -> RowsByServer:
        """Nothing for any server."""
        return self.rows_by_server(np.empty(0, np.int64))

    def num_row_bytes(self, num_rows: int) -> int:
        """Bytes of row numbers."""
        return num_rows * self.row_type.itemsize

    def _local(self, rows: Ints, number: int) -> torch.Tensor:
        return torch.from_numpy((rows - self.bounds[number]).astype(self.row_type))

    def _send(
        self, name: str, function: Callable[..., torch.futures.Future[torch.Tensor]], *args: object
    ) -> torch.futures.Future[torch.Tensor]:
        self._wait(MOST_UNANSWERED * len(self.names))
        answer: torch.futures.Future[torch.Tensor] = self._workers.call(
            name, function, self._ranks.rank, self._number, *args
        )
        self._unanswered.append((name, answer))
        return answer

    def _wait(self, most: int) -> None:
        """Wait until at most so many calls are unanswered.

        Of those that are answered, none has failed.
        """
        while self._unanswered and (len(self._unanswered) > most or self._unanswered[0][1].done()):
            name, answer = self._unanswered.popleft()
            with self._workers.explained(name):
                answer.wait()

    def _count(self, num_bytes: int) -> None:
        """Servers keep no account: what they send and receive is the trainer's."""
        self._ranks.traffic.sent += num_bytes
        self._ranks.traffic.received += num_bytes
