"""Messages whose numbers nobody wants: ranks send them one after the other, each for itself.

Rows, gradients and embeddings say how many of them come, so what a rank does with them needs no
other rank. What it gets is memory of that size which all such messages share; what it gives is let
go at once, but for its shape. So however many ranks are counted, the numbers of one are there.
Messages of ids and counts are those of :func:`~pibroch.sim.lockstep.lockstep`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from pibroch.exchange.messages import Counts, Joined, Message, MixedRows, Received, Rows
from pibroch.exchange.wire import RowWire
from pibroch.kernels.arrays import Ints, Records
from pibroch.sim.lockstep import FEATURES, Clock, Operation, lockstep, size_of, tensor_of

T = TypeVar("T")


def one_record(num_rows: int, width: int) -> Records:
    """Rows that are all the same record in memory, however many; each can be written.

    >>> rows = one_record(1 << 40, 16)
    >>> rows[7] = 1
    >>> float(rows[1 << 39, 3])
    1.0
    """
    return as_strided(np.zeros((1, width), np.float32), (num_rows, width), (0, 4))


def shapes_of(things: Any) -> Any:
    """Tensors and arrays in lists without their memory: the same lists of shapes.

    A tensor that is there several times stays one.

    >>> part = torch.ones(3, 4)
    >>> [first, second] = shapes_of([part, part])
    >>> first is second, first.nbytes, tuple(first.shape)
    (True, 48, (3, 4))
    """
    made: dict[int, Tensor] = {}

    def shape(thing: Any) -> Any:
        if thing is None or isinstance(thing, list | tuple):
            return thing and [shape(each) for each in thing]
        if id(thing) not in made:
            tensor = torch.from_numpy(thing) if isinstance(thing, np.ndarray) else thing
            made[id(thing)] = torch.empty_like(tensor, device="meta")
        return made[id(thing)]

    return shape(things)


class Blank:
    """Memory that all numbers share which are read for no reason but that a run reads them."""

    def __init__(self) -> None:
        self._bytes = torch.zeros(0, dtype=torch.uint8)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Of this shape; what is in it may be anything, and changes."""
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        if num_bytes > len(self._bytes):
            self._bytes = torch.zeros(num_bytes, dtype=torch.uint8)
        return self._bytes[:num_bytes].view(dtype).view(tuple(shape))

    def like(self, shapes: Any) -> Any:
        """For each of the shapes that :func:`shapes_of` gave."""
        if isinstance(shapes, list):
            return [self.like(each) for each in shapes]
        return self.tensor(shapes.shape, shapes.dtype)


class RowRuns:
    """Runs operations that send rows: side by side where these hold numbers, else rank by rank.

    Args:
        has_numbers: whether they do.
        width: floats of a row, see :func:`~pibroch.sim.lockstep.lockstep`.
        clock: to time the parts, which takes numbers.
    """

    def __init__(self, has_numbers: bool, width: float, clock: Clock | None) -> None:
        assert has_numbers or clock is None, "what has no numbers takes another time"
        self._has_numbers = has_numbers
        self._width = width
        self._clock = clock
        self.blank = Blank()

    def run(
        self, name: str, wire: RowWire, run: Callable[[int], Joined[T]], ids: Sequence[int]
    ) -> tuple[list[T], Operation]:
        """What each rank's generator returns, or its shapes, and what was done."""
        if not self._has_numbers:
            return rank_by_rank(name, wire, run, ids, self._width, self.blank)
        runs = [run(rank) for rank in range(len(ids))]
        return lockstep(name, wire, runs, ids, self._width, self._clock)

    def kept(self, things: T) -> T:
        """Numbers that another operation needs, or their shapes."""
        return things if self._has_numbers else shapes_of(things)

    def given(self, things: T) -> T:
        """These numbers, or some in the shapes that were kept; they change with the next ones."""
        return things if self._has_numbers else self.blank.like(things)

    def gradients(self, parts: Sequence[Tensor], value: float) -> list[Tensor]:
        """For embeddings, or their shapes: so much each."""
        if not self._has_numbers:
            return self.given(list(parts))
        return [torch.full_like(part, value) for part in parts]


def rank_by_rank(
    name: str,
    wire: RowWire,
    run: Callable[[int], Joined[T]],
    ids: Sequence[int],
    width: float,
    blank: Blank,
) -> tuple[list[T], Operation]:
    """Run each rank's generator alone; returns what each returns, as shapes, and what was done.

    Args:
        name: of the operation.
        wire: any rank's, which says in which type rows travel.
        run: makes the generator of a rank, of all its lanes.
        ids: of each rank, that the operation is about.
        width: floats of a row, by which flat messages of records are counted as rows.
        blank: memory of what comes.
    """
    size = len(ids)
    operation = Operation(name)
    results: list[T] = []
    for rank in range(size):
        going = run(rank)
        part = _part(operation, 0, size)
        part[rank, 0] = ids[rank]
        number = 0
        try:
            messages = next(going)
            while True:
                part[rank, 3:5] = size_of([tensor_of(each) for each in messages], width)
                _sent(operation, number, size)[rank] += _to_each(messages, wire)
                answers = [Received(_answer(each, blank)) for each in messages]
                number += 1
                part = _part(operation, number, size)
                part[rank, 1:3] = size_of([each.tensor for each in answers], width)
                messages = going.send(answers)
        except StopIteration as end:
            results.append(shapes_of(end.value))
        assert number == len(operation.sent), "all ranks yield the same kinds of messages"
    for sent in operation.sent:
        np.fill_diagonal(sent, 0)
    operation.seconds = [np.zeros(size) for _ in operation.parts]
    return results, operation


def _part(operation: Operation, number: int, size: int) -> Any:
    if number == len(operation.parts):
        operation.parts.append(np.zeros((size, len(FEATURES))))
    return operation.parts[number]


def _sent(operation: Operation, number: int, size: int) -> Any:
    if number == len(operation.sent):
        operation.sent.append(np.zeros((size, size), np.int64))
    return operation.sent[number]


def _to_each(messages: Sequence[Message], wire: RowWire) -> Ints:
    """Bytes of messages for each rank."""
    total: Ints = np.sum([bytes_to_each(each, wire) for each in messages], axis=0, dtype=np.int64)
    return total


def bytes_to_each(message: Message, wire: RowWire) -> Ints:
    """Bytes of a message for each rank, itself included, ``[W]``."""
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


def _answer(message: Message, blank: Blank) -> Tensor:
    if isinstance(message, MixedRows):
        return torch.from_numpy(message.received)
    assert not isinstance(message, Counts), "counts are exchanged side by side"
    tensor = message.values
    assert tensor.is_floating_point(), "ids are exchanged side by side"
    if isinstance(message, Rows) and message.out is not None:
        return message.out
    return blank.tensor((sum(message.receive_counts), *tensor.shape[1:]), tensor.dtype)
