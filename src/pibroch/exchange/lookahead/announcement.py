"""What ranks tell each other about a batch that they have read: its size and the rows it touches.

The planner thread prepares a rank's own part, the communication thread announces it.

A message to each rank::

    int64 samples (-1: a bad batch) | int64 1 unless a filler | int64 bytes of the batch |
    for each lane int64 distinct rows and int64 bytes of rows | rows, lane by lane | room left
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
from pibroch.exchange.fresh_rows import FreshRecords
from pibroch.exchange.lookahead.oracle.kernels import varint
from pibroch.exchange.messages import Messages, Values
from pibroch.exchange.rows import BatchIds, group
from pibroch.kernels import route as routing
from pibroch.kernels.arrays import Bytes, Ints
from pibroch.kernels.scatter_update import Grouped
from pibroch.observability.trace import span


@dataclass(slots=True)
class BytesByPurpose:
    """Bytes that this rank sent, by purpose."""

    sent: dict[str, int] = field(default_factory=dict)

    def add(self, purpose: str, num_bytes: int) -> None:
        """Count bytes that are sent for a purpose."""
        self.sent[purpose] = self.sent.get(purpose, 0) + num_bytes


@dataclass(frozen=True, slots=True)
class PreparedLane:
    """A rank's own part of a batch in one lane.

    Attributes:
        ids: of it, without the rows themselves.
        grouped: its positions by distinct address, rising.
        row_of_position: int32 ``[V]``, the number of each position's address among the distinct
            ones.
        encoded: the distinct addresses, as the oracle's kernel ``varint`` writes them.
        fresh: all rows of the lane that begin anew with the batch, on whichever rank.
    """

    ids: BatchIds
    grouped: Grouped
    row_of_position: NDArray[np.int32]
    encoded: Bytes
    fresh: FreshRecords | None

    def emptied(self) -> PreparedLane:
        """The part without rows, for a batch with a problem on some rank: nobody reads its rows."""
        return replace(self, grouped=group_rows(np.empty(0, np.int64)), encoded=self.encoded[:0])


@dataclass(frozen=True, slots=True)
class Prepared:
    """A rank's own part of a batch.

    Attributes:
        lanes: of all lanes.
        num_samples, num_bytes: of it.
        problem: with it.
    """

    lanes: Sequence[PreparedLane]
    num_samples: int
    num_bytes: int
    problem: RowIdError | None


@dataclass(slots=True)
class Announcement:
    """A batch, as all ranks know it.

    Attributes:
        here: this rank's own part.
        rows: distinct addresses, by lane and rank; none of a batch with a problem; empty where rows
            are not announced.
        share: this rank's share of the global batch.
        is_real: whether some rank's part is one of its own batches, and not a filler after its last
            one.
        problem: with some rank's part, as this rank is to report it.
        num_bytes: of the largest part.
    """

    here: Prepared
    rows: Sequence[Sequence[Ints]]
    share: float
    is_real: bool
    problem: DataError | None
    num_bytes: int


def prepare(lanes: Sequence[RowLane], batch: JaggedBatch) -> Prepared:
    """A rank's own part of a batch, which needs nothing of the other ranks."""
    batch.validate()  # may have been written to since it was made
    with span("group"):
        resolved = [_prepared(lane, batch) for lane in lanes]
    problem = next((problem for _, problem in resolved if problem is not None), None)
    return Prepared([each for each, _ in resolved], batch.batch_size, _bytes_of(batch), problem)


def _prepared(lane: RowLane, batch: JaggedBatch) -> tuple[PreparedLane, RowIdError | None]:
    ids, problem = lane.resolve(batch.pick(lane.layout.features))
    grouped = group(ids)
    row_of_position = np.empty(len(ids.row_ids), np.int32)
    routing.places(row_of_position, grouped)
    encoded = np.empty(varint.MAX_BYTES * len(grouped.rows), np.uint8)
    num_bytes = varint.encode(grouped.rows, encoded)
    ids = replace(ids, row_ids=np.empty(0, np.int64))
    encoded = encoded[:num_bytes].copy()
    return PreparedLane(ids, grouped, row_of_position, encoded, lane.fresh(batch)), problem


def _bytes_of(batch: JaggedBatch) -> int:
    """Bytes of memory that a batch takes while it waits."""
    others = (batch.weights, batch.sample_weights, batch.groups, batch.event_times)
    tensors = (batch.dense, batch.values, batch.offsets, batch.labels, *others)
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class Announcer:
    """Announces a rank's batches to all ranks and receives their announcements.

    Every rank does so in the same order, with as many batches.

    A batch takes one message to each rank. A receiver must know how large a message is, so it has
    room for as many bytes of rows as the batch before needed, and a sixteenth more. What has no
    room follows in a second message.

    Args:
        channel: between the ranks.
        announces_rows: whether rows are sent, and not only sizes.
        purposes: counts the bytes of rows to other ranks, with the room that was left empty.
    """

    def __init__(self, channel: Channel, announces_rows: bool, purposes: BytesByPurpose) -> None:
        self._channel = channel
        self._announces_rows = announces_rows
        self._purposes = purposes
        self._rank = channel.ranks.rank
        self._world_size = channel.ranks.world_size
        self._room = np.zeros(self._world_size, np.int64)  # for each rank's rows

    def announce(self, here: Prepared, is_real: bool) -> Messages[Announcement]:
        """Send this rank's part of a batch, and receive the others'.

        Args:
            here: this rank's part.
            is_real: unless it is a filler after this rank's last batch.
        """
        heads, encoded = yield from self._exchange(here, is_real)
        rows = self._decoded(here, heads, encoded) if self._announces_rows else []
        problem: DataError | None = here.problem
        if (heads[:, 0] < 0).any():
            problem = bad_batch(self._channel, here.problem)
            nothing = np.empty(0, np.int64)
            rows = [[nothing] * len(of_lane) for of_lane in rows]
            here = replace(here, lanes=[lane.emptied() for lane in here.lanes])
        share = here.num_samples / max(1, int(heads[:, 0].sum()))
        return Announcement(
            here, rows, share, bool(heads[:, 1].any()), problem, int(heads[:, 2].max())
        )

    def _exchange(self, here: Prepared, is_real: bool) -> Messages[tuple[Ints, list[Bytes]]]:
        """The numbers that head each rank's message, and its encoded rows."""
        size = self._world_size
        encoded = np.concatenate([lane.encoded for lane in here.lanes])
        of_lanes = [
            number for lane in here.lanes for number in (len(lane.grouped.rows), len(lane.encoded))
        ]
        head = np.array(
            [-1 if here.problem else here.num_samples, is_real, here.num_bytes, *of_lanes]
        )
        room = int(self._room[self._rank])
        self._purposes.add(
            "ids", (size - 1) * max(room, len(encoded)) if self._announces_rows else 0
        )
        message = np.zeros(head.nbytes + room, np.uint8)
        message[: head.nbytes] = head.view(np.uint8)
        message[head.nbytes : head.nbytes + len(encoded)] = encoded[:room]
        received = yield from self._to_all(message, head.nbytes + self._room)
        heads = np.stack([each[: head.nbytes].view(np.int64) for each in received])
        if not self._announces_rows:
            return heads, []
        num_bytes = heads[:, 4::2].sum(1)
        rest = np.maximum(num_bytes - self._room, 0)
        more = [encoded[:0]] * size
        if rest.any():
            more = yield from self._to_all(encoded[room:], rest)
        self._room = num_bytes + num_bytes // 16
        return heads, [
            np.concatenate([first[head.nbytes :], second])
            if len(second)
            else first[head.nbytes : head.nbytes + count]
            for first, second, count in zip(received, more, num_bytes.tolist(), strict=True)
        ]

    def _to_all(self, message: Bytes, sizes: Ints) -> Messages[list[Bytes]]:
        """Send ``message`` to every rank; returns what each rank sent, of these sizes."""
        size = self._world_size
        sent = torch.from_numpy(message if size == 1 else np.tile(message, size))
        answer = yield Values(sent, [len(message)] * size, sizes.tolist())
        return [piece.numpy() for piece in answer.tensor.split(sizes.tolist())]

    def _decoded(self, here: Prepared, heads: Ints, encoded: list[Bytes]) -> list[list[Ints]]:
        """The rows of all lanes and ranks."""
        rows = [[lane.grouped.rows] * self._world_size for lane in here.lanes]
        for rank, of_rank in enumerate(encoded):
            start = 0
            for lane, (num_rows, num_bytes) in enumerate(heads[rank, 3:].reshape(-1, 2).tolist()):
                if rank != self._rank:
                    rows[lane][rank] = _decoded_rows(
                        of_rank[start : start + num_bytes], num_rows, rank
                    )
                start += num_bytes
        return rows


def _decoded_rows(encoded: Bytes, num_rows: int, rank: int) -> Ints:
    rows = np.empty(num_rows, np.int64)
    if varint.decode(encoded, rows) != len(encoded):
        raise ProtocolError(
            f"{len(encoded)} bytes of rows from rank {rank}", "as many rows as it announced"
        )
    return rows
