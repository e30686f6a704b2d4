"""What the kernels of counted ids mean, without a thought of speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence


def groups_of_bits(number: int, first: int) -> Iterator[int]:
    """A number's lowest ``first`` bits, and groups of seven after them, until nothing is left."""
    yield number % (1 << first)
    number >>= first
    while number:
        yield number % 128
        number >>= 7


def encode(tables: Iterable[Sequence[int]]) -> bytes:
    """Of each table its distinct ids, rising, negative ones modulo 2**64, and then their counts.

    An id is its distance to the one before, in whose first byte the lowest bit says whether it
    stands there several times; of those that do, the count less 2. All bytes of a number but the
    last have the top bit set.

    >>> encode([[3, 3, 70, 70, 70, 71], [3]]).hex(" ")
    '07 87 01 02 00 01 06'
    """
    out = bytearray()
    for ids in tables:
        before = 0
        counts = sorted(Counter(ids).items())
        for id_, count in counts:
            first, *others = groups_of_bits((id_ - before) % (1 << 64), 6)
            before = id_
            append(out, [2 * first + (count > 1), *others])
        for _, count in counts:
            if count > 1:
                append(out, list(groups_of_bits(count - 2, 7)))
    return bytes(out)


def append(out: bytearray, number: list[int]) -> None:
    """A number's groups of bits, with the top bit set where another one follows."""
    out += bytes(byte + 128 for byte in number[:-1]) + bytes(number[-1:])
