"""Several lanes talk to the other ranks at once: what all of them have to say next travels as one message to each rank.

A lane's part of an exchange is a generator, a *talk*: it yields a message and gets what came from the others for it. All ranks
have the same lanes, and a lane yields the same kinds of messages on all ranks in the same order.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from pibroch.exchange.wire import RowWire, Spans
from pibroch.kernels.arrays import Records

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Counts:
    """Row p of int64 ``numbers`` ``[W, k]`` for each rank p; brings theirs, ``[W, k]``."""

    numbers: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """``send_counts[p]`` consecutive rows of a tensor of any type for each rank p; brings theirs, in rank order."""

    values: Tensor
    send_counts: Sequence[int]
    receive_counts: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """As :class:`Values`, of float32 that travels in the wire's type; what comes fills ``out``, if that is given."""

    values: Tensor
    send_counts: Sequence[int]
    receive_counts: Sequence[int]
    out: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class MixedRows:
    """Flat records and weights, see :meth:`RowWire.carry_mixed`; what comes fills ``received``."""

    message: Records
    send_spans: Spans
    received: Records
    receive_spans: Spans


class Came(NamedTuple):
    """The answer to a message.

    Attributes:
        tensor: what came from all ranks.
        sent: bytes of this message to other ranks that travelled by the wire; of several messages in one, its share.
    """

    tensor: Tensor
    sent: int = 0


Message = Counts | Values | Rows | MixedRows
Talk = Generator[Message, Came, T]
_KINDS: tuple[type[Message], ...] = (Counts, Values, Rows, MixedRows)


def together(wire: RowWire, talks: Sequence[Talk[T]]) -> list[T]:
    """Carry out talks side by side; returns what they return. All ranks call it with talks about the same lanes.

    Raises:
        Exception: what one of them raises, at the same place on all ranks; the others end there.
    """
    results: dict[int, T] = {}
    waiting: dict[int, Message] = {}

    def go_on(number: int, came: Came | None) -> None:
        waiting.pop(number, None)
        try:
            waiting[number] = next(talks[number]) if came is None else talks[number].send(came)
        except StopIteration as end:
            results[number] = end.value

    try:
        for number in range(len(talks)):
            go_on(number, None)
        while waiting:
            kind = next(kind for kind in _KINDS if any(isinstance(each, kind) for each in waiting.values()))
            chosen = [number for number in sorted(waiting) if isinstance(waiting[number], kind)]
            answers = _carried(wire, [waiting[number] for number in chosen])
            for number, came in zip(chosen, answers, strict=True):
                go_on(number, came)
    finally:
        for talk in talks:
            talk.close()
    return [results[number] for number in range(len(talks))]


def _carried(wire: RowWire, messages: Sequence[Message]) -> list[Came]:
    """Answers to messages of one kind."""
    first = messages[0]
    before = wire.sent
    if isinstance(first, Counts):
        numbers = [message.numbers for message in messages if isinstance(message, Counts)]
        together = numbers[0] if len(numbers) == 1 else torch.cat(numbers, 1)
        came = wire.channel.exchange_counts(together).split([each.shape[1] for each in numbers], 1)
        return [Came(each) for each in came]
    if isinstance(first, Values):
        return _values(wire, [message for message in messages if isinstance(message, Values)])
    if isinstance(first, Rows):
        rows = [message for message in messages if isinstance(message, Rows)]
        tensors = _rows(wire, rows)
        weights = [_floats_to_others(wire, message.values, message.send_counts) for message in rows]
    else:
        mixed = [message for message in messages if isinstance(message, MixedRows)]
        tensors = _mixed(wire, mixed)
        here = wire.channel.ranks.rank
        weights = [sum(map(sum, message.send_spans)) - sum(message.send_spans[here]) for message in mixed]
    sent, total = wire.sent - before, max(1, sum(weights))
    return [Came(tensor, round(sent * weight / total)) for tensor, weight in zip(tensors, weights, strict=True)]


def _floats_to_others(wire: RowWire, values: Tensor, send_counts: Sequence[int]) -> int:
    per_row = values[:1].numel() if len(values) else 0
    return per_row * (sum(send_counts) - send_counts[wire.channel.ranks.rank])


def _values(wire: RowWire, messages: Sequence[Values]) -> list[Came]:
    channel = wire.channel
    if len(messages) == 1 or channel.ranks.world_size == 1:
        return [Came(channel.all_to_all(each.values, each.send_counts, each.receive_counts)) for each in messages]
    widths = [each.values.dtype.itemsize * int(np.prod(each.values.shape[1:])) for each in messages]
    flat = [torch.from_numpy(each.values.numpy().reshape(-1).view(np.uint8)) for each in messages]
    sizes = [[width * count for count in each.send_counts] for width, each in zip(widths, messages, strict=True)]
    coming = [[width * count for count in each.receive_counts] for width, each in zip(widths, messages, strict=True)]
    send, receive = _sums(sizes), _sums(coming)
    received = channel.all_to_all(_by_rank(flat, sizes), send, receive)
    parts = _by_lane(received, coming)
    return [
        Came(part.view(each.values.dtype).view(sum(each.receive_counts), *each.values.shape[1:]))
        for part, each in zip(parts, messages, strict=True)
    ]


def _rows(wire: RowWire, messages: Sequence[Rows]) -> list[Tensor]:
    if len(messages) == 1:
        (each,) = messages
        return [wire.carry(each.values, each.send_counts, each.receive_counts, each.out)]
    widths = [int(np.prod(each.values.shape[1:])) for each in messages]
    sizes = [[width * count for count in each.send_counts] for width, each in zip(widths, messages, strict=True)]
    coming = [[width * count for count in each.receive_counts] for width, each in zip(widths, messages, strict=True)]
    flat = [each.values.reshape(-1) for each in messages]
    received = wire.carry(_by_rank(flat, sizes), _sums(sizes), _sums(coming))
    parts = [
        part.view(-1, *each.values.shape[1:]) if part.numel() else each.values.new_empty(0, *each.values.shape[1:])
        for part, each in zip(_by_lane(received, coming), messages, strict=True)
    ]
    return [part if each.out is None else each.out.copy_(part) for part, each in zip(parts, messages, strict=True)]


def _mixed(wire: RowWire, messages: Sequence[MixedRows]) -> list[Tensor]:
    if len(messages) == 1:
        (each,) = messages
        wire.carry_mixed(each.message, each.send_spans, each.received, each.receive_spans)
        return [torch.from_numpy(each.received)]
    sent = np.concatenate(_spans_by_rank([(each.message, each.send_spans) for each in messages]))
    places = _spans_by_rank([(each.received, each.receive_spans) for each in messages])
    received = np.empty(sum(map(len, places)), np.float32)
    spans = [_span_sums([each.send_spans for each in messages]), _span_sums([each.receive_spans for each in messages])]
    wire.carry_mixed(sent, spans[0], received, spans[1])
    ends = np.cumsum([0, *map(len, places)])
    for place, start, end in zip(places, ends[:-1], ends[1:], strict=True):
        place[:] = received[start:end]
    return [torch.from_numpy(each.received) for each in messages]


def _spans_by_rank(floats: Sequence[tuple[Records, Spans]]) -> list[Records]:
    """For each rank views of all lanes' records, then of all lanes' weights."""
    pieces = [np.split(each, np.cumsum([size for span in spans for size in span])[:-1]) for each, spans in floats]
    return [lane[number] for number in range(len(pieces[0])) for lane in pieces]


def _span_sums(spans: Sequence[Spans]) -> Spans:
    total = np.sum([np.asarray(each) for each in spans], axis=0)
    return [(whole, lent) for whole, lent in total.tolist()]


def _sums(sizes: Sequence[Sequence[int]]) -> list[int]:
    return [sum(of_rank) for of_rank in zip(*sizes, strict=True)]


def _by_rank(flat: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> Tensor:
    """Lanes' numbers as one, each rank's of all lanes side by side."""
    parts = [each.split(list(of_rank)) for each, of_rank in zip(flat, sizes, strict=True)]
    return torch.cat([part for of_rank in zip(*parts, strict=True) for part in of_rank])


def _by_lane(received: Tensor, sizes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The inverse, of what came."""
    order = [size for of_rank in zip(*sizes, strict=True) for size in of_rank]
    parts, lanes = received.split(order), len(sizes)
    return [torch.cat(parts[lane::lanes]) for lane in range(lanes)]
