"""What ranks tell each other about a batch when they have read it: how large it is and which rows it touches.

A message to each rank::

    int64 samples (-1: a bad batch) | int64 1 unless a filler | int64 distinct rows | int64 bytes of rows |
    int64 bytes of the batch | rows | room left
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from pibroch.collectives import Channel
from pibroch.data import JaggedBatch
from pibroch.embedding.rows import group_rows
from pibroch.errors import DataError, ProtocolError, RowIdError
from pibroch.exchange.agreement import bad_batch
from pibroch.exchange.alltoall.row_lane import RowLane
from pibroch.exchange.rows import BatchIds, group
from pibroch.kernels import parallel
from pibroch.kernels.arrays import Bytes, Ints
from pibroch.kernels.route import numba as routing
from pibroch.kernels.scatter_update.numba import Grouped
from pibroch.kernels.varint import numba as varint
from pibroch.observability.trace import span


@dataclass(slots=True)
class BytesByPurpose:
    """Bytes that this rank sent, by purpose."""

    sent: dict[str, int] = field(default_factory=dict)

    def add(self, purpose: str, num_bytes: int) -> None:
        """Count."""
        self.sent[purpose] = self.sent.get(purpose, 0) + num_bytes


@dataclass(frozen=True, slots=True)
class Prepared:
    """A rank's own part of a batch.

    Attributes:
        ids: of it, without the rows themselves.
        grouped: its positions by distinct address, rising.
        row_of_position: int32 ``[V]``, the number of each position's address among the distinct ones.
        encoded: the distinct addresses as bytes.
        num_samples, num_bytes: of the part.
        problem: with the part; it then counts as without ids.
    """

    ids: BatchIds
    grouped: Grouped
    row_of_position: NDArray[np.int32]
    encoded: Bytes
    num_samples: int
    num_bytes: int
    problem: RowIdError | None


@dataclass(slots=True)
class Announcement:
    """A batch as all ranks know it.

    Attributes:
        here: this rank's own part.
        rows_of_rank: distinct addresses that each rank touches, none of a batch with a problem; empty where they are not told.
        share: this rank's share of the global batch.
        is_real: whether some rank's part is one of its own batches, and not a filler after its last one.
        problem: with some rank's part, as this rank is to report it.
        num_bytes: of the largest part.
    """

    here: Prepared
    rows_of_rank: Sequence[Ints]
    share: float
    is_real: bool
    problem: DataError | None
    num_bytes: int


def prepare(lane: RowLane, batch: JaggedBatch) -> Prepared:
    """What can be known of a batch without the other ranks."""
    with span("group"):
        ids, problem = lane.resolve(batch.select(lane.layout.features))
        grouped = group(ids)
        row_of_position = np.empty(len(ids.row_ids), np.int32)
        parallel.run(routing.places, len(grouped.rows), grouped, row_of_position)
    encoded = np.empty(varint.MAX_BYTES * len(grouped.rows), np.uint8)
    num_bytes = varint.encode(grouped.rows, encoded)
    ids = replace(ids, row_ids=np.empty(0, np.int64))
    return Prepared(
        ids, grouped, row_of_position, encoded[:num_bytes].copy(), batch.batch_size, _bytes_of(batch), problem
    )


def _bytes_of(batch: JaggedBatch) -> int:
    """What it takes of memory while it waits."""
    tensors = (batch.dense, batch.values, batch.offsets, batch.labels, batch.weights)
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class Announcer:
    """Tells all ranks of batches and hears of theirs; every rank does so in the same order, with as many batches.

    A batch takes one message to each rank, in which there is as much room for rows as the batch before would have needed,
    and a sixteenth more: how large a message is must be known to who receives it. What has no room follows in a second one.

    Args:
        channel: between the ranks.
        tells_rows: whether the rows themselves are told; without, nobody hears of others' rows.
        purposes: counts the bytes of rows to other ranks, with the room that was left empty.
    """

    def __init__(self, channel: Channel, tells_rows: bool, purposes: BytesByPurpose) -> None:
        self._channel, self._tells_rows, self._purposes = channel, tells_rows, purposes
        self._rank, self._world_size = channel.ranks.rank, channel.ranks.world_size
        self._room = np.zeros(self._world_size, np.int64)  # for each rank's rows

    def announce(self, here: Prepared, is_real: bool) -> Announcement:
        """Tell this rank's part of a batch, and hear the others'.

        Args:
            here: this rank's part.
            is_real: unless it is a filler after this rank's last batch.
        """
        with span("announce"):
            heads, pieces = self._exchange(here, is_real)
        rows = self._decoded(here, heads, pieces) if self._tells_rows else []
        problem: DataError | None = here.problem
        if (heads[:, 0] < 0).any():
            problem = bad_batch(self._channel, here.problem)
            nothing = np.empty(0, np.int64)
            rows = [nothing] * len(rows)
            here = replace(here, grouped=group_rows(nothing), encoded=here.encoded[:0])
        share = here.num_samples / max(1, int(heads[:, 0].sum()))
        return Announcement(here, rows, share, bool(heads[:, 1].any()), problem, int(heads[:, 4].max()))

    def _exchange(self, here: Prepared, is_real: bool) -> tuple[Ints, list[list[Bytes]]]:
        """For each rank the five numbers that head its message, and its encoded rows in two pieces."""
        size, encoded = self._world_size, here.encoded
        num_samples = -1 if here.problem else here.num_samples
        head = np.array([num_samples, is_real, len(here.grouped.rows), len(encoded), here.num_bytes])
        room = int(self._room[self._rank])
        self._purposes.add("ids", (size - 1) * max(room, len(encoded)) if self._tells_rows else 0)
        message = np.zeros(head.nbytes + room, np.uint8)
        message[: head.nbytes] = head.view(np.uint8)
        message[head.nbytes : head.nbytes + len(encoded)] = encoded[:room]
        received = self._to_all(message, head.nbytes + self._room)
        heads = np.stack([each[: head.nbytes].view(np.int64) for each in received])
        if not self._tells_rows:
            return heads, []
        rest = np.maximum(heads[:, 3] - self._room, 0)
        more = self._to_all(encoded[room:], rest) if rest.any() else [encoded[:0]] * size
        self._room = heads[:, 3] + heads[:, 3] // 16
        return heads, [[first[head.nbytes :], second] for first, second in zip(received, more, strict=True)]

    def _to_all(self, message: Bytes, sizes: Ints) -> list[Bytes]:
        """Send ``message`` to every rank; returns what came from each, of these sizes."""
        size = self._world_size
        sent = torch.from_numpy(message if size == 1 else np.tile(message, size))
        received = self._channel.all_to_all(sent, [len(message)] * size, sizes.tolist())
        return [piece.numpy() for piece in received.split(sizes.tolist())]

    def _decoded(self, here: Prepared, heads: Ints, pieces: list[list[Bytes]]) -> list[Ints]:
        """The rows of all ranks."""
        rows = [here.grouped.rows] * self._world_size
        for rank, (first, rest) in enumerate(pieces):
            if rank == self._rank:
                continue
            num_rows, num_bytes = heads[rank, 2:4].tolist()
            encoded = np.concatenate([first, rest]) if len(rest) else first[:num_bytes]
            rows[rank] = np.empty(num_rows, np.int64)
            if varint.decode(encoded, rows[rank]) != num_bytes:
                raise ProtocolError(f"{num_bytes} bytes of rows from rank {rank}", "as many rows as it announced")
        return rows
