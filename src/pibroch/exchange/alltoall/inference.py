"""A lookup that nothing is updated for, as one message to each rank, a question, and one back.

The lookup of :class:`AllToAllExchange` needs three messages, each of which depends on the one
before, as receivers must know sizes. Here messages carry their sizes, and a bad batch is noticed
before anything is sent. The embeddings are the same to the last bit.

A question is int64 numbers (samples, whether it is of a batch of one's own, how long the asking
rank took for the step before, then bytes and a note for each lane) and the lanes' parts; an answer
is the lanes' vectors in the type of the wire. Parts begin at multiples of eight bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.exchange.alltoall.exchange import AllToAllExchange
from pibroch.exchange.alltoall.lane import LaneQuestion
from pibroch.kernels.arrays import Bytes, Records

ALIGNMENT_BYTES = 8


@dataclass(frozen=True, slots=True)
class Question:
    """What a rank asks all others, and itself, for a batch.

    Attributes:
        batch: that it is about.
        messages: bytes for each rank.
        lanes: the parts.
    """

    batch: JaggedBatch
    messages: Sequence[Bytes]
    lanes: Sequence[LaneQuestion]


class InferenceLookup:
    """Questions and answers of the ranks of one exchange.

    It reads rows of this rank, so the thread that would train must be the one that calls it.

    Args:
        exchange: holds the rows.
    """

    def __init__(self, exchange: AllToAllExchange) -> None:
        self._exchange = exchange
        self._lanes = exchange.lanes
        self.num_ranks = self._lanes[0].world_size
        self._head_bytes = 8 * (3 + 2 * len(self._lanes))

    def ask(self, batch: JaggedBatch, is_real: bool = True, took_ns: int = 0) -> Question:
        """What to ask for a batch; sends nothing.

        Args:
            batch: as the exchange knows it, see :meth:`pibroch.Embeddings.prepared`.
            is_real: false for a filler after this rank's last batch.
            took_ns: nanoseconds that this rank took for the step before, without waiting for
                others.

        Raises:
            DataError: for a malformed batch, or an id outside its table (RowIdError).
        """
        batch.validate()
        lanes = [lane.ask(batch) for lane in self._lanes]
        messages = []
        for p in range(self.num_ranks):
            numbers = [batch.batch_size, int(is_real), took_ns]
            for each in lanes:
                numbers += [len(each.parts[p]), each.notes[p]]
            messages.append(
                _joined(
                    [np.array(numbers, np.int64).view(np.uint8), *(each.parts[p] for each in lanes)]
                )
            )
        return Question(batch, messages, lanes)

    def nothing(self, width: int, is_real: bool, took_ns: int = 0) -> Question:
        """The question of a batch without samples, with ``width`` dense features."""
        none = torch.empty(0)
        offsets = torch.zeros(1, dtype=torch.int64)
        keys = self._exchange.features
        return self.ask(
            JaggedBatch(torch.empty(0, width), keys, none.long(), offsets, none), is_real, took_ns
        )

    def is_real(self, message: Bytes) -> bool:
        """Whether a question is of a batch of the asking rank's own."""
        return bool(message[8:16].view(np.int64)[0])

    def took_ns(self, message: Bytes) -> int:
        """How long the asking rank took, see :meth:`ask`."""
        return int(message[16:24].view(np.int64)[0])

    def answer(self, message: Bytes, averaged_at: int | None) -> Bytes:
        """The answer to a rank's question; the message is not needed any more.

        Args:
            message: one of :attr:`Question.messages`, of whatever rank, that is for this one.
            averaged_at: answer with moving averages as of this step instead of the weights.
        """
        numbers = message[: self._head_bytes].view(np.int64).tolist()
        parts = []
        start = self._head_bytes
        for lane, nbytes, note in zip(self._lanes, numbers[3::2], numbers[4::2], strict=True):
            vectors = lane.answer(message[start : start + nbytes], numbers[0], note, averaged_at)
            start += _padded(nbytes)
            parts.append(narrowed(vectors, lane.wire.dtype))
        return _joined(parts)

    def embeddings(self, question: Question, answers: Sequence[Bytes]) -> list[Tensor]:
        """The embeddings of each group of tables, as :meth:`AllToAllExchange.lookup` gives them.

        Args:
            question: that was asked.
            answers: of each rank; not needed any more afterwards.
        """
        starts = [0] * self.num_ranks
        pooled = []
        room = self._exchange.room_for(question.batch)
        for lane, part in zip(self._lanes, question.lanes, strict=True):
            width = lane.layout.width
            dtype = lane.wire.dtype
            vectors = []
            for p, count in enumerate(part.num_vectors):
                nbytes = count * width * dtype.itemsize
                vectors.append(
                    widened(answers[p][starts[p] : starts[p] + nbytes], dtype).reshape(count, width)
                )
                starts[p] += _padded(nbytes)
            pooled.append(part.pool(vectors, room))
        return self._exchange.assemble(question.batch, pooled)


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _joined(parts: Sequence[Bytes]) -> Bytes:
    return np.concatenate(list(_with_padding(parts)))


def _with_padding(parts: Sequence[Bytes]) -> Iterator[Bytes]:
    for part in parts:
        yield part
        yield np.zeros(_padded(len(part)) - len(part), np.uint8)


def narrowed(vectors: Records, dtype: torch.dtype) -> Bytes:
    """Float32 numbers as they travel, flat."""
    if dtype == torch.float32:
        return np.ascontiguousarray(vectors).reshape(-1).view(np.uint8)
    return torch.from_numpy(vectors).to(dtype).view(torch.int16).numpy().reshape(-1).view(np.uint8)


def widened(data: Bytes, dtype: torch.dtype) -> Records:
    """The inverse of :func:`narrowed`; exact numbers are a view."""
    if dtype == torch.float32:
        return data.view(np.float32)
    return torch.from_numpy(data.view(np.int16)).view(dtype).float().numpy()
