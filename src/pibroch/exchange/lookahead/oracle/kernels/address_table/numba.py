"""An open-addressing hash table.

A small number for each address in use, found in one cache line most of the time.

A place of the table is a pair (address + 1, or 0 where nobody is; number). An address lies at the
place that its hash names or, where that is taken, as near behind it as there is room, the last
place being followed by the first. What leaves gives its place to those behind it that have been
pushed away from theirs, so that no search goes over places of the dead, and a table that is used
for ever stays as quick as a new one. Numbers of addresses stay while these move: they are handed
out from 0 on, those given back first, and so never exceed the most addresses that were there at
once.

Each table multiplies by a random number of its own, so that strangers cannot choose addresses that
share a place; no number that is handed out depends on it.

H places (a power of two), N addresses in use, at most H / 4: half of the time of a table that is
half full goes into searches that end where no branch predictor expects it.
"""

from __future__ import annotations

import secrets
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.arrays import Array, Ints, RowIds
from pibroch.kernels.memory import prefetch
from pibroch.kernels.policy import kernel

AHEAD = 16  # addresses between the one that is looked for and the one whose place is fetched
PLACES_PER_ADDRESS = 4  # at least


class AddressTable(NamedTuple):
    """Numbers by address.

    Attributes:
        pairs: int32 or int64 ``[H, 2]``: address + 1, 0 for an empty place; number.
        free: int32 ``[H / 4]``, a stack of numbers that were given back.
        counts: int64 ``[4]``: addresses in use, numbers that were ever given, numbers on the stack;
            the odd number below 2^32 by which addresses are multiplied.
    """

    pairs: Array
    free: NDArray[np.int32]
    counts: Ints


def empty_table(num_places: int, dtype: np.dtype[Any]) -> AddressTable:
    """A table of ``num_places``, a power of two from 4 on.

    ``dtype`` must hold the greatest address + 1.
    """
    assert num_places >= PLACES_PER_ADDRESS and num_places & (num_places - 1) == 0, num_places
    return AddressTable(
        np.zeros((num_places, 2), dtype),
        np.empty(num_places // PLACES_PER_ADDRESS, np.int32),
        # products of neighbours are far from each other where the top bit is set
        np.array([0, 0, 0, 1 << 31 | secrets.randbits(30) << 1 | 1], np.int64),
    )


@kernel
def place_of(address: int, num_bits: int, multiplier: int) -> Any:
    """The place that an address hashes to, of ``2 ** num_bits``; products fit 64 bits."""
    low = np.uint64((address ^ (address >> 32)) & 0xFFFFFFFF)
    return ((low * np.uint64(multiplier)) & np.uint64(0xFFFFFFFF)) >> np.uint64(32 - num_bits)


@kernel
def num_bits_of(table: AddressTable) -> int:
    """Of places' numbers."""
    num_bits = 0
    while (1 << num_bits) < len(table.pairs):
        num_bits += 1
    return num_bits


@kernel
def find_or_add(table: AddressTable, addresses: RowIds, numbers: NDArray[np.int32]) -> None:
    """Write the number of each address; one without gets one. Duplicates are allowed.

    Args:
        table: with room for as many more as there are addresses: H / 4 in all.
        addresses: of any integer type.
        numbers: int32 ``[len(addresses)]``.
    """
    pairs = table.pairs
    free = table.free
    counts = table.counts
    multiplier = counts[3]
    num_bits = num_bits_of(table)
    mask = np.uint64(len(pairs) - 1)
    final = len(addresses) - 1
    for i in range(len(addresses)):
        prefetch(
            pairs,
            np.int64(
                place_of(np.int64(addresses[min(i + AHEAD, final)]), num_bits, multiplier)
                << np.uint64(1)
            ),
        )
        key = np.int64(addresses[i]) + 1
        at = place_of(key - 1, num_bits, multiplier)
        while pairs[at, 0] != key and pairs[at, 0] != 0:
            at = (at + np.uint64(1)) & mask
        if pairs[at, 0] == 0:
            if counts[2] > 0:
                counts[2] -= 1
                number = np.int64(free[counts[2]])
            else:
                number = counts[1]
                counts[1] += 1
            counts[0] += 1
            pairs[at, 0] = key
            pairs[at, 1] = number
        numbers[i] = pairs[at, 1]


@kernel
def remove(table: AddressTable, addresses: RowIds) -> None:
    """Take distinct addresses out that are there; their numbers may be given to others."""
    pairs = table.pairs
    free = table.free
    counts = table.counts
    multiplier = counts[3]
    num_bits = num_bits_of(table)
    mask = np.uint64(len(pairs) - 1)
    final = len(addresses) - 1
    size = np.uint64(len(pairs))
    for i in range(len(addresses)):
        prefetch(
            pairs,
            np.int64(
                place_of(np.int64(addresses[min(i + AHEAD, final)]), num_bits, multiplier)
                << np.uint64(1)
            ),
        )
        key = np.int64(addresses[i]) + 1
        hole = place_of(key - 1, num_bits, multiplier)
        while pairs[hole, 0] != key:
            hole = (hole + np.uint64(1)) & mask
        free[counts[2]] = pairs[hole, 1]
        counts[2] += 1
        counts[0] -= 1
        at = (hole + np.uint64(1)) & mask
        while pairs[at, 0] != 0:
            wanted = place_of(np.int64(pairs[at, 0]) - 1, num_bits, multiplier)
            # it was pushed over the hole, or from there
            if (at + size - wanted) & mask >= (at + size - hole) & mask:
                pairs[hole, 0] = pairs[at, 0]
                pairs[hole, 1] = pairs[at, 1]
                hole = at
            at = (at + np.uint64(1)) & mask
        pairs[hole, 0] = 0


@kernel
def copy_into(table: AddressTable, larger: AddressTable) -> None:
    """Enter all addresses with their numbers into an empty table with more places."""
    pairs = larger.pairs
    multiplier = larger.counts[3]
    num_bits = num_bits_of(larger)
    mask = np.uint64(len(pairs) - 1)
    for i in range(len(table.pairs)):
        if table.pairs[i, 0] != 0:
            at = place_of(np.int64(table.pairs[i, 0]) - 1, num_bits, multiplier)
            while pairs[at, 0] != 0:
                at = (at + np.uint64(1)) & mask
            pairs[at, 0] = table.pairs[i, 0]
            pairs[at, 1] = table.pairs[i, 1]
    larger.free[: table.counts[2]] = table.free[: table.counts[2]]
    larger.counts[:3] = table.counts[:3]
