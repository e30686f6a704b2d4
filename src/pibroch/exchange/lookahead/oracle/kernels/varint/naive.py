"""What the varint kernels mean, without a thought of speed."""

from __future__ import annotations

from collections.abc import Iterable


def encode(numbers: Iterable[int]) -> bytes:
    """Each number's distance to the one before in groups of seven bits, lowest first.

    All but the last have the top bit set.
    """
    out = bytearray()
    before = 0
    for number in numbers:
        gap = number - before
        before = number
        while gap >= 128:
            out.append(gap % 128 + 128)
            gap //= 128
        out.append(gap)
    return bytes(out)


def decode(encoded: bytes) -> list[int]:
    """The numbers that :func:`encode` got."""
    numbers = []
    number = 0
    gap = 0
    shift = 0
    for byte in encoded:
        gap += byte % 128 << shift
        shift += 7
        if byte < 128:
            number += gap
            numbers.append(number)
            gap = shift = 0
    return numbers
