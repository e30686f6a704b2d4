"""Distinct ids and their counts in few bytes: distances of rising numbers, in groups of bits.

Most ids of a batch stand there once and near another one, and take a byte or two.

T tables, V ids of one table after the other, U distinct ones likewise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.arrays import Bytes, Ints
from pibroch.kernels.dedupe.numba import dedupe
from pibroch.kernels.policy import kernel

MAX_BYTES = 15  # of one id, 10 of them its distance
SIX = np.uint64(6)  # bits of a distance are in its first byte
LOW_SIX = np.uint64(63)
BITS = np.uint64(7)
MASK = np.uint64(127)
MORE = np.uint64(128)
ONE = np.uint64(1)


@kernel
def encode(
    ids: Ints, bounds: Ints, out: Bytes, sizes: Ints, numbers: NDArray[np.int32]
) -> np.int64:
    """Write each table's distinct ids and their counts, see :mod:`.naive`.

    Args:
        ids: ``[V]``.
        bounds: ``[T + 1]``, of each table's.
        out: receives ``MAX_BYTES`` an id at most.
        sizes: ``[T]``, receives how many distinct ones there are.
        numbers: ``[V]``, receives the number of each id's distinct one among all of them.

    Returns:
        How many bytes were written.
    """
    num_ids = len(ids)
    sequence = np.empty(num_ids, np.int32)
    for i in range(num_ids):
        sequence[i] = i
    distinct = np.empty(num_ids, np.int64)
    begins = np.empty(num_ids + 1, np.int32)
    order = np.empty(num_ids, np.int32)
    filled = np.uint64(0)
    number = 0
    for table in range(len(sizes)):
        start = bounds[table]
        stop = bounds[table + 1]
        num = dedupe(ids, sequence, distinct, begins, order, start, stop)
        sizes[table] = num
        final = start + num
        begins[final] = stop
        before = np.uint64(0)
        for u in range(start, final):
            id_ = np.uint64(distinct[u])
            gap = id_ - before
            before = id_
            repeats = np.uint64(begins[u + 1] - begins[u] > 1)
            filled = _put(((gap & LOW_SIX) << ONE) | repeats, gap >> SIX, out, filled)
        for u in range(start, final):
            count = begins[u + 1] - begins[u]
            if count >= 130:
                filled = _put(
                    np.uint64(count - 2) & MASK, np.uint64(count - 2) >> BITS, out, filled
                )
            else:
                out[filled] = max(count - 2, 0)
                filled += np.uint64(count > 1)
        u = start
        for i in range(start, stop):
            u += np.int64(begins[u + 1] == i)
            numbers[order[i]] = number + u - start
        number += num
    return np.int64(filled)


@kernel
def _put(byte: Any, rest: Any, out: Bytes, filled: Any) -> Any:
    """Write a number, of which the first byte is known; returns where the next one goes.

    There is no branch between one byte and two, which no processor could foresee.
    """
    out[filled] = byte | (MORE if rest > 0 else np.uint64(0))
    out[filled + ONE] = rest & MASK
    filled += ONE + np.uint64(rest > 0)
    while rest > MASK:
        out[filled - ONE] |= MORE
        rest >>= BITS
        out[filled] = rest & MASK
        filled += ONE
    return filled


@kernel
def decode(
    encoded: Bytes,
    sizes: Ints,
    starts: Ints,
    ids: Ints,
    counts: NDArray[np.int32],
) -> np.int64:
    """The inverse of :func:`encode`.

    Args:
        encoded: bytes of all tables.
        sizes: ``[T]``, how many distinct ids each has.
        starts: ``[T]``, where each one's go.
        ids: receives them, rising in each table.
        counts: likewise.

    Returns:
        How many bytes they took, or -1 where these do not hold so many.
    """
    at = np.uint64(0)
    size = np.uint64(len(encoded))
    for table in range(len(sizes)):
        id_ = np.uint64(0)
        start = starts[table]
        stop = start + sizes[table]
        for place in range(start, stop):
            if at + ONE >= size:  # a second byte is read in any case
                if at >= size or encoded[at] >= MORE:
                    return np.int64(-1)
                byte = np.uint64(encoded[at])
                second = np.uint64(0)
            else:
                byte = np.uint64(encoded[at])
                second = np.uint64(encoded[at + ONE])
            goes_on = byte >> BITS
            second = second if goes_on > 0 else np.uint64(0)
            gap = ((byte & MASK) >> ONE) | ((second & MASK) << SIX)
            at += ONE + goes_on
            shift = SIX + BITS
            while second >= MORE:
                if at >= size or shift > np.uint64(63):
                    return np.int64(-1)
                second = np.uint64(encoded[at])
                at += ONE
                gap |= (second & MASK) << shift
                shift += BITS
            id_ += gap
            ids[place] = np.int64(id_)
            counts[place] = byte & ONE
        for place in range(start, stop):
            repeats = np.uint64(counts[place])
            if at >= size and repeats > 0:
                return np.int64(-1)
            byte = np.uint64(encoded[at]) if at < size else np.uint64(0)
            more = byte & MASK
            at += repeats
            shift = BITS
            while repeats * byte >= MORE:
                if at >= size or shift > np.uint64(28):
                    return np.int64(-1)
                byte = np.uint64(encoded[at])
                at += ONE
                more |= (byte & MASK) << shift
                shift += BITS
            counts[place] = np.int32(ONE + repeats * (ONE + more))
    return np.int64(at)
