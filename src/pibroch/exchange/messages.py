"""Several lanes send messages at once: the next one of each travels as one message to each rank.

A lane's part of an exchange is a generator of messages: it yields one and gets what the other ranks
sent for it. All ranks have the same lanes, and a lane yields the same kinds of messages on all
ranks in the same order. The communication thread runs the generators, one step after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from pibroch.exchange.wire import RowWire, Spans
from pibroch.kernels.arrays import Array, Records

T = TypeVar("T")
Flat = Array
"""A lane's numbers, ``[N]``."""


@dataclass(frozen=True, slots=True, eq=False)
class Counts:
    """Row p of int64 ``numbers`` ``[W, k]`` for each rank p; answered by their rows, ``[W, k]``."""

    numbers: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """``send_counts[p]`` consecutive rows of a tensor of any type for each rank p.

    Answered by the rows of all ranks, in rank order.
    """

    values: Tensor
    send_counts: Sequence[int]
    receive_counts: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """As :class:`Values`, of float32 that travels in the wire's type.

    The answer fills ``out``, if that is given.
    """

    values: Tensor
    send_counts: Sequence[int]
    receive_counts: Sequence[int]
    out: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class MixedRows:
    """Flat records and weights, see :meth:`RowWire.carry_mixed`; the answer fills ``received``."""

    message: Records
    send_spans: Spans
    received: Records
    receive_spans: Spans


class Received(NamedTuple):
    """The answer to a message.

    Attributes:
        tensor: what all ranks sent.
        sent: bytes of this message to other ranks that travelled by the wire; of several messages
            in one, its share.
    """

    tensor: Tensor
    sent: int = 0


Message = Counts | Values | Rows | MixedRows
Messages = Generator[Message, Received, T]
"""What a lane sends to and receives from other ranks, and in the end its result."""
Joined = Generator[list[Message], Sequence[Received], T]
"""What several lanes send at once, messages of one kind, and in the end their result."""
_KINDS: tuple[type[Message], ...] = (Counts, Values, Rows, MixedRows)


def together(wire: RowWire, generators: Sequence[Messages[T]]) -> list[T]:
    """Run lanes' generators side by side, their messages joined; returns what they return.

    All ranks call it with generators of the same lanes.

    Raises:
        Exception: what one of them raises, at the same place on all ranks; the others end there.
    """
    return carried(wire, joined(generators))


def carried(wire: RowWire, run: Joined[T]) -> T:
    """Carry what a joined generator sends; returns its result. All ranks call it alike.

    Raises:
        Exception: as :func:`together`.
    """
    try:
        messages = next(run)
        while True:
            messages = run.send(_answers(wire, messages))
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        run.close()


def joined(generators: Sequence[Messages[T]]) -> Joined[list[T]]:
    """One generator of several lanes': it yields messages of one kind that travel as one.

    It gets an answer to each of them.
    """
    results: dict[int, T] = {}
    waiting: dict[int, Message] = {}

    def go_on(number: int, answer: Received | None) -> None:
        waiting.pop(number, None)
        try:
            waiting[number] = (
                next(generators[number]) if answer is None else generators[number].send(answer)
            )
        except StopIteration as end:
            results[number] = end.value

    try:
        for number in range(len(generators)):
            go_on(number, None)
        while waiting:
            kind = next(
                kind for kind in _KINDS if any(isinstance(each, kind) for each in waiting.values())
            )
            chosen = [number for number in sorted(waiting) if isinstance(waiting[number], kind)]
            answers = yield [waiting[number] for number in chosen]
            for number, answer in zip(chosen, answers, strict=True):
                go_on(number, answer)
    finally:
        for generator in generators:
            generator.close()
    return [results[number] for number in range(len(generators))]


def alone(messages: Messages[T]) -> Joined[T]:
    """The messages of one lane."""
    (result,) = yield from joined([messages])
    return result


def _answers(wire: RowWire, messages: Sequence[Message]) -> list[Received]:
    """Answers to messages of one kind."""
    first = messages[0]
    before = wire.sent
    if isinstance(first, Counts):
        numbers = [message.numbers for message in messages if isinstance(message, Counts)]
        numbers_of_lanes = numbers[0] if len(numbers) == 1 else torch.cat(numbers, 1)
        received = wire.channel.exchange_counts(numbers_of_lanes).split(
            [each.shape[1] for each in numbers], 1
        )
        return [Received(each) for each in received]
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
        weights = [
            sum(map(sum, message.send_spans)) - sum(message.send_spans[here]) for message in mixed
        ]
    sent = wire.sent - before
    total = max(1, sum(weights))
    return [
        Received(tensor, round(sent * weight / total))
        for tensor, weight in zip(tensors, weights, strict=True)
    ]


def _floats_to_others(wire: RowWire, values: Tensor, send_counts: Sequence[int]) -> int:
    per_row = values[:1].numel() if len(values) else 0
    return per_row * (sum(send_counts) - send_counts[wire.channel.ranks.rank])


def _values(wire: RowWire, messages: Sequence[Values]) -> list[Received]:
    channel = wire.channel
    if len(messages) == 1 or channel.ranks.world_size == 1:
        return [
            Received(channel.all_to_all(each.values, each.send_counts, each.receive_counts))
            for each in messages
        ]
    values = [each.values for each in messages]
    outs = [_room_for(each) for each in messages]
    flat = [
        [each.numpy().reshape(-1).view(np.uint8) for each in tensors] for tensors in (values, outs)
    ]
    for own, place in _exchanged(
        channel.ranks.rank, messages, flat[0], flat[1], channel.all_to_all
    ):
        place[:] = own
    return [Received(each) for each in outs]


def _rows(wire: RowWire, messages: Sequence[Rows]) -> list[Tensor]:
    ranks = wire.channel.ranks
    if len(messages) == 1 or ranks.world_size == 1:
        return [
            wire.carry(each.values, each.send_counts, each.receive_counts, each.out)
            for each in messages
        ]
    values = [each.values for each in messages]
    outs = [_room_for(each) if each.out is None else each.out for each in messages]
    flat = [[each.numpy().reshape(-1) for each in tensors] for tensors in (values, outs)]
    for own, place in _exchanged(ranks.rank, messages, flat[0], flat[1], wire.carry):
        place[:] = wire.rounded(own)
    return outs


def _room_for(message: Values | Rows) -> Tensor:
    return message.values.new_empty(sum(message.receive_counts), *message.values.shape[1:])


def _exchanged(
    here: int,
    messages: Sequence[Values | Rows],
    values: Sequence[Flat],
    outs: Sequence[Flat],
    carry: Callable[[Tensor, Sequence[int], Sequence[int]], Tensor],
) -> list[tuple[Flat, Flat]]:
    """Send the lanes' ``values`` as one message to each other rank, and fill ``outs`` with theirs.

    Returns:
        Of each lane what stays here, and where it belongs: large, and not to be copied on the way.
    """
    going = [_cut_by(each.send_counts, flat) for each, flat in zip(messages, values, strict=True)]
    coming = [_cut_by(each.receive_counts, flat) for each, flat in zip(messages, outs, strict=True)]
    sends, places = (list(zip(*parts, strict=True)) for parts in (going, coming))
    own = list(zip(sends[here], places[here], strict=True))
    sends[here] = places[here] = ()
    counts = [[sum(map(len, parts)) for parts in each] for each in (sends, places)]
    message = torch.from_numpy(np.concatenate([part for parts in sends for part in parts]))
    _fill([place for parts in places for place in parts], carry(message, *counts).numpy())
    return own


def _cut_by(counts: Sequence[int], flat: Flat) -> list[Flat]:
    """Views of each rank's part."""
    width = len(flat) // max(1, sum(counts))
    return _cut(flat, [width * count for count in counts])


def _cut(flat: Flat, sizes: Sequence[int]) -> list[Flat]:
    """As ``np.split``, which takes five times as long."""
    return [flat[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _fill(places: Sequence[Flat], numbers: Flat) -> None:
    """Copy ``numbers``, the parts one behind the other, to their places."""
    for place, part in zip(places, _cut(numbers, [len(place) for place in places]), strict=True):
        place[:] = part


def _mixed(wire: RowWire, messages: Sequence[MixedRows]) -> list[Tensor]:
    if len(messages) == 1:
        (each,) = messages
        wire.carry_mixed(each.message, each.send_spans, each.received, each.receive_spans)
        return [torch.from_numpy(each.received)]
    sent = np.concatenate(_spans_by_rank([(each.message, each.send_spans) for each in messages]))
    places = _spans_by_rank([(each.received, each.receive_spans) for each in messages])
    received = np.empty(sum(map(len, places)), np.float32)
    spans = [
        _span_sums([each.send_spans for each in messages]),
        _span_sums([each.receive_spans for each in messages]),
    ]
    wire.carry_mixed(sent, spans[0], received, spans[1])
    _fill(places, received)
    return [torch.from_numpy(each.received) for each in messages]


def _spans_by_rank(floats: Sequence[tuple[Records, Spans]]) -> list[Records]:
    """For each rank views of all lanes' records, then of all lanes' weights."""
    pieces = [_cut(each, [size for span in spans for size in span]) for each, spans in floats]
    return [lane[number] for number in range(len(pieces[0])) for lane in pieces]


def _span_sums(spans: Sequence[Spans]) -> Spans:
    return [
        (sum(records for records, _ in of_rank), sum(weights for _, weights in of_rank))
        for of_rank in zip(*spans, strict=True)
    ]
