"""What the Huffman kernels mean, without a thought of speed. Both read what the other wrote."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping

MAX_LENGTH = 11
HEADER = 128


def code_lengths(numbers: bytes) -> dict[int, int]:
    """Bits of each number's code, at most ``MAX_LENGTH``: frequent numbers have short ones."""
    heap = [(count, number, [number]) for number, count in Counter(numbers).items()]
    lengths = dict.fromkeys((number for _, number, _ in heap), 1 if len(heap) == 1 else 0)
    heapq.heapify(heap)
    while len(heap) > 1:
        (one, tie, few) = heapq.heappop(heap)
        (other, _, more) = heapq.heappop(heap)
        for number in few + more:
            lengths[number] += 1
        heapq.heappush(heap, (one + other, tie, few + more))
    return {number: 8 for number in range(256)} if max(lengths.values()) > MAX_LENGTH else lengths


def codes(lengths: Mapping[int, int]) -> dict[int, str]:
    """Canonical codes: shorter before longer, among equally long ones by number."""
    codes = {}
    code = 0
    before = 0
    for number, length in sorted(lengths.items(), key=lambda item: (item[1], item[0])):
        code <<= length - before
        codes[number] = format(code, f"0{length}b")
        before = length
        code += 1
    return codes


def encode(numbers: bytes) -> bytes:
    """256 lengths of four bits, then the codes, each from its first bit on.

    They are bits of 32-bit words, the lowest bit first.
    """
    lengths = code_lengths(numbers)
    nibbles = [lengths.get(number, 0) for number in range(256)]
    header = bytes(low | high << 4 for low, high in zip(nibbles[::2], nibbles[1::2], strict=True))
    table = codes(lengths)
    bits = "".join(table[number] for number in numbers)
    bits += "0" * (-len(bits) % 32)
    return header + b"".join(
        int(bits[at : at + 32][::-1], 2).to_bytes(4, "little") for at in range(0, len(bits), 32)
    )


def decode(encoded: bytes, length: int) -> bytes:
    """``length`` numbers."""
    nibbles = [half for byte in encoded[:HEADER] for half in (byte & 15, byte >> 4)]
    number_of = {
        code: number
        for number, code in codes({n: bits for n, bits in enumerate(nibbles) if bits}).items()
    }
    bits = _bits(encoded[HEADER:])
    numbers = bytearray()
    while len(numbers) < length:
        code = next(bits)
        while code not in number_of:
            code += next(bits)
        numbers.append(number_of[code])
    return bytes(numbers)


def _bits(words: bytes) -> Iterator[str]:
    for byte in words:  # words of little-endian bytes
        yield from format(byte, "08b")[::-1]
