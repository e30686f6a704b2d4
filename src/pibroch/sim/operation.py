"""What all ranks do in one piece of work: parts, and the messages between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pibroch.exchange.messages import Counts, Message, MixedRows, Rows
from pibroch.exchange.wire import RowWire
from pibroch.kernels.arrays import Ints

FEATURES = ("ids", "rows_in", "bytes_in", "rows_out", "bytes_out")
"""What the cost of a part depends on, beside a constant; rows and bytes of its messages."""


@dataclass(slots=True)
class Operation:
    """What one call of all ranks did: parts of work, and messages between them.

    Attributes:
        name: of the operation.
        parts: float64 ``[W, len(FEATURES)]`` each, in their order: work before the first message,
            between two, after the last.
        sent: int64 ``[W, W]`` each: bytes from rank to rank of the messages, nothing to itself; or,
            of very many ranks, what each sends and gets: a :class:`~pibroch.sim.cluster.Flow`.
        seconds: float64 ``[W]`` each, that the parts took here; none where they were not timed.
        extra: likewise, that compressing messages and making them whole again took.
        groups: ranks that wait for each other alone; ``None`` where all wait for all.
        is_known: whether it is one of pibroch's own, whose costs a machine's file may have.
    """

    name: str
    parts: list[NDArray[np.float64]] = field(default_factory=list)
    sent: list[Any] = field(default_factory=list)
    seconds: list[NDArray[np.float64]] = field(default_factory=list)
    extra: list[NDArray[np.float64]] = field(default_factory=list)
    groups: Sequence[Sequence[int]] | None = None
    is_known: bool = True


class Part:
    """What one rank does between two messages of a piece of work, and the message after it.

    Attributes:
        about: see :data:`FEATURES`.
        seconds: that it took.
        extra: seconds in which messages were compressed, or made whole again.
        sent: bytes to each rank, ``[W]``.
    """

    __slots__ = ("about", "extra", "seconds", "sent")

    def __init__(self, size: int) -> None:
        self.about = [0.0] * len(FEATURES)
        self.seconds = 0.0
        self.extra = 0.0
        self.sent = [0] * size


class Work:
    """A piece of work of one rank.

    Args:
        size: W.
        compresses: whether time in which messages are made, or arrive, is noted: much where they
            travel compressed.

    Attributes:
        parts: before, between and after its messages.
        members: the ranks that they go to; ``None`` without messages.
    """

    def __init__(self, size: int, compresses: bool = False) -> None:
        self._size = size
        self._compresses = compresses
        self.parts = [Part(size)]
        self.members: tuple[int, ...] | None = None
        self._waits = self._has_sent = False

    def part(self, number: int) -> Part:
        """A part, or one in which nothing happens."""
        return self.parts[number] if number < len(self.parts) else Part(self._size)

    def spend(self, seconds: float) -> None:
        """Time passes."""
        part = self.parts[-1]
        if not self._waits:
            part.seconds += seconds
        elif self._compresses:
            part.extra += seconds

    def begin_message(self, tensors: Sequence[Tensor], width: float) -> None:
        """The work goes on when a message is answered."""
        self.parts[-1].about[3:5] = size_of(tensors, width)
        self._waits = True
        self._has_sent = False

    def send(self, here: int, members: tuple[int, ...], num_bytes: Sequence[int]) -> None:
        """So many bytes go to each member of a group; of one message several times."""
        self.members = members
        if not (self._waits and self._has_sent):
            self.parts.append(Part(self._size))
        self._has_sent = True
        if not self._waits:  # all that is known of them
            self.parts[-2].about[4] += sum(num_bytes)
        sent = self.parts[-2].sent
        for member, size in zip(members, num_bytes, strict=True):
            if member != here:
                sent[member] += size

    def end_message(self, tensors: Sequence[Tensor], width: float) -> None:
        """The answers are there."""
        if not self._has_sent:  # one rank alone
            self.parts.append(Part(self._size))
        self._waits = False
        self.parts[-1].about[1:3] = size_of(tensors, width)


def of_all_ranks(name: str, works: Sequence[Work], is_known: bool) -> Operation:
    """One operation from the work of all ranks; who sends fewer messages sends empty ones last."""
    groups = sorted({each.members for each in works if each.members is not None})
    whole = Operation(name, groups=groups if len(groups) > 1 else None, is_known=is_known)
    num_parts = max(len(each.parts) for each in works)
    for number in range(num_parts):
        parts = [each.part(number) for each in works]
        whole.parts.append(np.array([part.about for part in parts]))
        whole.seconds.append(np.array([part.seconds for part in parts]))
        whole.extra.append(np.array([part.extra for part in parts]))
        if number < num_parts - 1:
            whole.sent.append(np.array([part.sent for part in parts], np.int64))
    return whole


def tensor_of(message: Message) -> Tensor:
    """What a message sends."""
    if isinstance(message, Counts):
        return message.numbers
    return torch.from_numpy(message.message) if isinstance(message, MixedRows) else message.values


def bytes_to_each(message: Message, wire: RowWire) -> Ints:
    """Bytes of a message for each rank of a wire, this one included, ``[W]``."""
    narrow = wire.dtype.itemsize
    if isinstance(message, Counts):
        numbers = message.numbers
        return np.full(len(numbers), numbers[0].nbytes, np.int64)
    if isinstance(message, MixedRows):  # records stay as they are
        spans: Ints = np.array(message.send_spans, np.int64) @ np.array([4, narrow])
        return spans
    tensor = message.values
    per_row = tensor[:1].numel() * (narrow if isinstance(message, Rows) else tensor.itemsize)
    sent: Ints = per_row * np.array(message.send_counts, np.int64)
    return sent


def size_of(tensors: Sequence[Tensor], width: float) -> tuple[float, int]:
    """Rows and bytes of what is sent or has come; of flat floats, ``width`` count as a row."""
    rows = sum(
        len(tensor) / (width if tensor.ndim == 1 and tensor.is_floating_point() else 1)
        for tensor in tensors
    )
    return rows, sum(tensor.nbytes for tensor in tensors)
