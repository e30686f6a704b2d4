"""Numbers in fewer bytes, without loss: the highest byte of each is compressed by zstd.

That byte has most of the exponent. Exponents of a batch's rows and gradients take 3 to 3.5 bits,
while sign and mantissa look like noise: a float32 takes about 27 bits, a bfloat16 about 11. The
other bytes, whose number is known, are sent at once; the codes are made meanwhile and follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import zstandard
from torch import Tensor

from pibroch.collectives import Channel
from pibroch.errors import ProtocolError
from pibroch.kernels import planes
from pibroch.kernels.arrays import Array, Bytes
from pibroch.observability.trace import span

Numbers = Array  # unsigned
_LEVEL = 1  # higher ones look for repetitions, of which there are none
HEAD = 0.25
"""The part of the other bytes that is sent first; meanwhile all codes are made.

That takes 4 ms for 1.5 million numbers.
"""


def exchange_compressed(
    channel: Channel, sending: Sequence[Sequence[Numbers]], arriving: Sequence[Sequence[Numbers]]
) -> int:
    """Send numbers to each rank, fill arrays with theirs; returns the bytes sent to other ranks.

    The communication thread calls it, on every rank in the same order.

    Args:
        channel: between several ranks.
        sending: for each rank arrays of unsigned numbers.
        arriving: for each rank the arrays to fill, of the types and lengths that it sends.

    Raises:
        ProtocolError: when another rank sent other codes than it announced.
    """
    here = channel.ranks.rank
    for source, target in zip(sending[here], arriving[here], strict=True):
        target[:] = source
    sending, arriving = (
        [[] if p == here else parts for p, parts in enumerate(each)] for each in (sending, arriving)
    )
    low = [_low_of(parts) for parts in sending]
    room = [_low_of(parts) for parts in arriving]
    tops = [_split(parts, each) for parts, each in zip(sending, low, strict=True)]
    finish = [channel.begin_all_to_all(_heads(low), _heads(room))]  # while codes are made
    with span("compress"):
        codes = [_compressed(top) for top in tops]
    lengths = torch.tensor([len(code) for code in codes])
    their_lengths = torch.empty_like(lengths)
    finish_lengths = channel.begin_all_to_all(lengths.split(1), their_lengths.split(1))
    finish.append(channel.begin_all_to_all(_tails(low), _tails(room)))  # beside the lengths
    finish_lengths()
    num_tops = [sum(map(len, parts)) for parts in arriving]
    received = _rooms(their_lengths.tolist(), num_tops)
    finish.append(
        channel.begin_all_to_all(
            [*map(torch.from_numpy, codes)], [*map(torch.from_numpy, received)]
        )
    )
    for each in finish:
        each()
    with span("decompress"):
        for parts, lower, code, length in zip(arriving, room, received, num_tops, strict=True):
            _join(parts, lower, _decompressed(code, length))
    return (
        sum(each.nbytes for each in low)
        + sum(map(len, codes))
        + (len(codes) - 1) * lengths.itemsize
    )


def _heads(low: Sequence[Bytes]) -> list[Tensor]:
    return [torch.from_numpy(each[: int(len(each) * HEAD)]) for each in low]


def _tails(low: Sequence[Bytes]) -> list[Tensor]:
    return [torch.from_numpy(each[int(len(each) * HEAD) :]) for each in low]


def _split(parts: Sequence[Numbers], low: Bytes) -> Bytes:
    """Write all but the highest bytes of the numbers to ``low``, one array after the other.

    Returns the highest ones.
    """
    top = np.empty(sum(map(len, parts)), np.uint8)
    for numbers, lower, highest in _planes(parts, low, top):
        planes.split(numbers, lower, highest)
    return top


def _join(parts: Sequence[Numbers], low: Bytes, top: Bytes) -> None:
    for numbers, lower, highest in _planes(parts, low, top):
        planes.join(lower, highest, numbers)


def _planes(
    parts: Sequence[Numbers], low: Bytes, top: Bytes
) -> Iterator[tuple[Numbers, Bytes, Bytes]]:
    first_low = first = 0
    for numbers in parts:
        end_low = first_low + (numbers.itemsize - 1) * len(numbers)
        end = first + len(numbers)
        yield (
            numbers,
            low[first_low:end_low].reshape(numbers.itemsize - 1, len(numbers)),
            top[first:end],
        )
        first_low = end_low
        first = end


def _low_of(parts: Sequence[Numbers]) -> Bytes:
    """Room for all but the highest bytes."""
    return np.empty(sum((numbers.itemsize - 1) * len(numbers) for numbers in parts), np.uint8)


def _rooms(lengths: Sequence[int], at_most: Sequence[int]) -> list[Bytes]:
    """Room for ``lengths`` bytes of codes from each rank."""
    for rank, (length, most) in enumerate(zip(lengths, at_most, strict=True)):
        if not 0 <= length <= most:
            raise ProtocolError(f"{length} bytes of codes from rank {rank}", f"at most {most}")
    return [np.empty(length, np.uint8) for length in lengths]


def _compressed(top: Bytes) -> Bytes:
    """Codes of bytes; the bytes themselves where codes are not shorter."""
    code = zstandard.ZstdCompressor(_LEVEL).compress(top.data)
    # a copy, as torch wants memory that can be written
    return np.frombuffer(code, np.uint8).copy() if len(code) < len(top) else top


def _decompressed(code: Bytes, length: int) -> Bytes:
    if len(code) == length:
        return code
    try:
        # looked at first, as so much memory is taken
        if zstandard.frame_content_size(code.data) == length:
            top = zstandard.ZstdDecompressor().decompress(code.data)
            return np.frombuffer(top, np.uint8).copy()
    except zstandard.ZstdError:
        pass
    raise ProtocolError(
        f"{len(code)} bytes that are no codes of {length} numbers", "what another rank sent"
    )
