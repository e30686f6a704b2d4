"""All ranks of an exchange in one process: their generators of messages, side by side.

What a lane, a carrier or an announcer does between two messages is what it does in a run; only the
network is left out: an answer is made of what the other ranks' generators have yielded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pibroch.collectives.ranks import Channel, Ranks
from pibroch.collectives.transport import Transport, Wait
from pibroch.errors import PibrochError
from pibroch.exchange.messages import (
    Counts,
    Joined,
    Message,
    MixedRows,
    Received,
    Rows,
    Values,
)
from pibroch.exchange.wire import RowWire
from pibroch.kernels.arrays import Ints

T = TypeVar("T")
Clock = Callable[[], float]
FEATURES = ("ids", "rows_in", "bytes_in", "rows_out", "bytes_out")
"""What the cost of a part depends on, beside a constant; rows and bytes of its messages."""


class _NoNetwork(Transport):
    """For channels whose messages never leave the process."""

    def post(self, going: Sequence[Tensor], coming: Sequence[Tensor]) -> Wait:
        raise PibrochError("a message of a simulated rank", "generators that run in lockstep")

    def reduce(self, tensor: Tensor) -> Wait:
        raise PibrochError("a sum of a simulated rank", "generators that run in lockstep")

    def close(self) -> None:
        pass


def virtual_wire(rank: int, num_ranks: int, name: str = "float32") -> RowWire:
    """The wire of one of so many ranks that all are in this process."""
    return RowWire(Channel(Ranks(rank, num_ranks), _NoNetwork()), name)


@dataclass(slots=True)
class Operation:
    """What one call of all ranks did: parts of work, and messages between them.

    Attributes:
        name: of the operation.
        parts: float64 ``[W, len(FEATURES)]`` each, in their order: work before the first message,
            between two, after the last.
        sent: int64 ``[W, W]`` each: bytes from rank to rank of the messages, nothing to itself; or,
            of very many ranks, what each sends and gets: a :class:`~pibroch.sim.cluster.Flow`.
        seconds: float64 ``[W]`` each, that the parts took where a clock was given.
        groups: ranks that wait for each other alone; ``None`` where all wait for all.
    """

    name: str
    parts: list[NDArray[np.float64]] = field(default_factory=list)
    sent: list[Any] = field(default_factory=list)
    seconds: list[NDArray[np.float64]] = field(default_factory=list)
    groups: Sequence[Sequence[int]] | None = None


def lockstep(
    name: str,
    wire: RowWire,
    runs: Sequence[Joined[T]],
    ids: Sequence[int],
    width: float,
    clock: Clock | None = None,
) -> tuple[list[T], Operation]:
    """Run all ranks' generators; returns what that of each rank returns, and what was done.

    Args:
        name: of the operation.
        wire: any rank's, which says in which type rows travel.
        runs: of each rank, of all its lanes.
        ids: of each rank, that the operation is about.
        width: floats of a row, by which flat messages of records are counted as rows.
        clock: in seconds, to time the parts.
    """
    size = len(runs)
    operation = Operation(name)
    results: dict[int, T] = {}
    answers: list[list[Received]] | None = None
    while True:
        part = np.zeros((size, len(FEATURES)))
        part[:, 0] = ids if answers is None else 0
        seconds = np.zeros(size)
        messages: list[list[Message]] = []
        for rank, run in enumerate(runs):
            begin = clock() if clock else 0.0
            yielded = _go_on(run, None if answers is None else answers[rank], results, rank)
            seconds[rank] = clock() - begin if clock else 0.0
            if answers is not None:
                part[rank, 1:3] = size_of([answer.tensor for answer in answers[rank]], width)
            if yielded is not None:
                messages.append(yielded)
                part[rank, 3:5] = size_of([tensor_of(message) for message in yielded], width)
        operation.parts.append(part)
        operation.seconds.append(seconds)
        if not messages:
            return [results[rank] for rank in range(size)], operation
        assert len(messages) == size, "all ranks yield the same kinds of messages"
        answers, sent = _exchanged(messages, wire)
        operation.sent.append(sent)


def beside(operations: Sequence[Operation], groups: Sequence[Sequence[int]]) -> Operation:
    """One operation of all ranks, from the same one of groups of them that do it side by side.

    A group that sends fewer messages than another sends empty ones after them.
    """
    size = sum(map(len, groups))
    whole = Operation(operations[0].name, groups=groups)
    most = max(len(each.parts) for each in operations)
    whole.parts = [np.zeros((size, len(FEATURES))) for _ in range(most)]
    whole.seconds = [np.zeros(size) for _ in range(most)]
    whole.sent = [np.zeros((size, size), np.int64) for _ in range(most - 1)]
    for each, group in zip(operations, groups, strict=True):
        members = np.array(group)
        for number, (part, seconds) in enumerate(zip(each.parts, each.seconds, strict=True)):
            whole.parts[number][members] = part
            whole.seconds[number][members] = seconds
        for number, sent in enumerate(each.sent):
            whole.sent[number][np.ix_(members, members)] = sent
    return whole


def _go_on(
    run: Joined[T], answers: Sequence[Received] | None, results: dict[int, T], rank: int
) -> list[Message] | None:
    try:
        return next(run) if answers is None else run.send(answers)
    except StopIteration as end:
        results[rank] = end.value
        return None


def tensor_of(message: Message) -> Tensor:
    """What a message sends."""
    if isinstance(message, Counts):
        return message.numbers
    return torch.from_numpy(message.message) if isinstance(message, MixedRows) else message.values


def size_of(tensors: Sequence[Tensor], width: float) -> tuple[float, int]:
    """Rows and bytes of what is sent or has come; of flat floats, ``width`` count as a row."""
    rows = sum(
        len(tensor) / (width if tensor.ndim == 1 and tensor.is_floating_point() else 1)
        for tensor in tensors
    )
    return rows, sum(tensor.nbytes for tensor in tensors)


def _exchanged(
    messages: Sequence[Sequence[Message]], wire: RowWire
) -> tuple[list[list[Received]], Ints]:
    """The answers of each rank to its messages, and bytes from rank to rank."""
    size = len(messages)
    sent = np.zeros((size, size), np.int64)
    answers: list[list[Received]] = [[] for _ in range(size)]
    for of_lane in zip(*messages, strict=True):
        first = of_lane[0]
        if isinstance(first, Counts):
            numbers = torch.stack([each.numbers for each in of_lane if isinstance(each, Counts)])
            sent += numbers.shape[2] * numbers.itemsize
            for rank in range(size):
                answers[rank].append(Received(numbers[:, rank]))
            continue
        pieces = [_pieces(each) for each in of_lane]  # [from][to]
        for to in range(size):
            whole = torch.cat([pieces[source][to] for source in range(size)])
            answers[to].append(Received(_received(of_lane[to], whole, wire)))
        sent += [
            [_num_bytes(each, to, pieces[source][to], wire) for to in range(size)]
            for source, each in enumerate(of_lane)
        ]
    np.fill_diagonal(sent, 0)
    return answers, sent


def _pieces(message: Message) -> list[Tensor]:
    if isinstance(message, MixedRows):
        whole = torch.from_numpy(message.message)
        return list(whole.split([sum(span) for span in message.send_spans]))
    assert isinstance(message, Values | Rows)
    return list(message.values.split(list(message.send_counts)))


def _received(message: Message, whole: Tensor, wire: RowWire) -> Tensor:
    if isinstance(message, MixedRows):
        message.received[:] = whole.numpy()
        return torch.from_numpy(message.received)
    if isinstance(message, Rows):
        whole = whole.to(wire.dtype).float()
        return whole if message.out is None else message.out.copy_(whole)
    return whole


def _num_bytes(message: Message, to: int, piece: Tensor, wire: RowWire) -> int:
    narrow = wire.dtype.itemsize
    if isinstance(message, MixedRows):  # records stay as they are
        records, weights = message.send_spans[to]
        return 4 * records + narrow * weights
    return piece.numel() * (narrow if isinstance(message, Rows) else piece.itemsize)
