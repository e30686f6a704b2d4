"""Cut rows, by falling count, into partitions of bounded accesses and size, without sorting them.

Rows of one count are alike, so a *run* of them is cut by arithmetic, and the partition of each row
follows from how many of its count came before it. Cost O(N) in row order, two streaming passes: a
histogram of counts, then the assignment.

N rows, R runs (distinct counts, falling), P partitions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.policy import kernel

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@kernel
def count_counts(
    accesses: Ints, batches: NDArray[np.int32], num_rows: Ints, batch_sums: Ints
) -> None:
    """Add the rows of each count, and their batches, to ``num_rows`` and ``batch_sums``.

    Both are ``[dense]``, for the counts below that.
    """
    dense = np.uint64(len(num_rows))
    for row in range(len(accesses)):
        count = np.uint64(accesses[row])
        if count < dense:
            num_rows[count] += 1
            batch_sums[count] += batches[row]


@kernel
def cut(
    counts: Ints,
    num_rows: Ints,
    batch_sums: Floats,
    max_accesses: float,
    max_rows: int,
    stops: Ints,
    sums: Floats,
) -> int:
    """Cut runs into partitions.

    Args:
        counts: of each run's rows, falling, ``[R]``.
        num_rows: of each run, ``[R]``.
        batch_sums: of each run's rows, ``[R]``.
        max_accesses: of a partition of more than one row.
        max_rows: of a partition.
        stops: ``[limit]``, receives where each partition ends among the sorted rows.
        sums: ``[limit, 3]``, receives rows, accesses and batches of each.

    Returns:
        P, or -1 when ``limit`` is too few.
    """
    limit = len(stops)
    place = 0
    end = 0
    rows = 0
    accesses = 0
    batches = 0.0
    for run in range(len(counts)):
        count = counts[run]
        left = num_rows[run]
        mean_batches = batch_sums[run] / max(1, left)
        while left > 0:
            take = min(left, max_rows - rows)
            if count > 0 and take > 0:
                room = max_accesses - accesses
                take = min(take, np.int64(room // count)) if room > 0 else 0
            if take <= 0 and rows == 0:
                take = 1
            if take <= 0:
                if place == limit:
                    return -1
                stops[place] = end
                sums[place, 0] = rows
                sums[place, 1] = accesses
                sums[place, 2] = batches
                place += 1
                rows = 0
                accesses = 0
                batches = 0.0
                continue
            left -= take
            end += take
            rows = rows + take
            accesses = accesses + take * count
            batches = batches + take * mean_batches
    if rows:
        if place == limit:
            return -1
        stops[place] = end
        sums[place, 0] = rows
        sums[place, 1] = accesses
        sums[place, 2] = batches
        place += 1
    return place


@kernel
def assign(
    accesses: Ints, cursor: Ints, current: Ints, stops: Ints, first: int, out: NDArray[np.uint16]
) -> None:
    """Write the partition of each row whose count is below ``dense``; called table after table.

    Args:
        accesses: ``[N]``.
        cursor: ``[dense]``, the place among the sorted rows of the next row of each count;
            advanced.
        current: ``[dense]``, the partition in which that place lies; advanced.
        stops: ``[P]`` as :func:`cut` wrote them.
        first: number of the first partition.
        out: ``[N]``.
    """
    dense = np.uint64(len(cursor))
    for row in range(len(accesses)):
        count = np.uint64(accesses[row])
        if count < dense:
            place = cursor[count]
            partition = current[count]
            while place >= stops[partition]:
                partition += 1
            out[row] = first + partition
            cursor[count] = place + 1
            current[count] = partition
