"""What rows and gradients need on their way between ranks: addresses, one place a distinct row.

V ids in a batch, U distinct rows, D weights in a row, F features, P parts of the table of most
parts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.arrays import Records, Stored
from pibroch.kernels.bits import lowest, widened
from pibroch.kernels.memory import MAX_SHORT_DIM, prefetch, prefetch_row
from pibroch.kernels.policy import kernel
from pibroch.kernels.scatter_update.numba import ROWS_AHEAD, Grouped

# ids whose places in the map are fetched before they are needed: a miss of both arrays an id
# otherwise
HOMES_AHEAD = 80


class Homes(NamedTuple):
    """Where the rows of each feature's table lie.

    Row r is row ``r // num_parts`` of part ``r % num_parts``.

    Or, where rows have homes of their own, with ``n = first_mapped + r``, row ``number[n]`` of part
    ``part_of[partition[n]]``.

    Attributes:
        num_rows: int64 ``[F]``.
        num_parts: uint32 ``[F]``.
        first_address: int64 ``[F, P]``, of each part's first row.
        first_mapped: int64 ``[F]``; -1 where homes follow from ids.
        partition: uint16 ``[N]``, of all rows that have homes of their own.
        number: uint32 ``[N]``, likewise.
        part_of: int64, of each partition.
    """

    num_rows: NDArray[np.int64]
    num_parts: NDArray[np.uint32]
    first_address: NDArray[np.int64]
    first_mapped: NDArray[np.int64]
    partition: NDArray[np.uint16]
    number: NDArray[np.uint32]
    part_of: NDArray[np.int64]


@kernel
def resolve_addresses(
    values: NDArray[np.int64],
    offsets: NDArray[np.int64],
    homes: Homes,
    addresses: NDArray[np.int64],
) -> int:
    """Write the address of each value to ``addresses``.

    Return the position of the first id out of range, or -1.
    """
    num_features = len(homes.num_rows)
    num_samples = (len(offsets) - 1) // num_features
    for feature in range(num_features):
        limit = homes.num_rows[feature]
        parts = homes.num_parts[feature]
        begin = offsets[feature * num_samples]
        end = offsets[(feature + 1) * num_samples]
        num_bad = 0
        for position in range(begin, end):
            num_bad += (values[position] < 0) | (values[position] >= limit)
        if num_bad:
            for position in range(begin, end):
                if values[position] < 0 or values[position] >= limit:
                    return position
        mapped = homes.first_mapped[feature]
        if mapped >= 0:
            for position in range(begin, end):
                ahead = mapped + values[min(position + HOMES_AHEAD, end - 1)]
                prefetch(homes.partition, ahead)
                prefetch(homes.number, ahead)
                row = mapped + values[position]
                part = homes.part_of[np.int64(homes.partition[row])]
                addresses[position] = homes.first_address[feature, part] + np.int64(
                    homes.number[row]
                )
        elif parts == 1:
            first = homes.first_address[feature, 0]
            for position in range(begin, end):
                addresses[position] = first + values[position]
        elif parts & (parts - np.uint32(1)) == 0:
            shift = lowest(np.int64(parts))
            first_address = homes.first_address[feature]
            for position in range(begin, end):
                part = np.uint64(values[position] & (np.int64(parts) - 1))
                addresses[position] = first_address[part] + (values[position] >> shift)
        elif limit < 1 << 32:
            for position in range(begin, end):
                value = np.uint32(values[position])  # half the cost of a 64-bit division
                row = value // parts
                addresses[position] = homes.first_address[feature, value - row * parts] + row
        else:
            for position in range(begin, end):
                row = values[position] // np.int64(parts)
                addresses[position] = (
                    homes.first_address[feature, values[position] - row * np.int64(parts)] + row
                )
    return -1


@kernel
def places(grouped: Grouped, out: NDArray[np.int64], start: int, stop: int) -> None:
    """Write the number of their row to the positions ``out`` ``[V]`` of some rows."""
    for u in range(start, stop):
        for place in range(grouped.segments[u], grouped.segments[u + 1]):
            out[grouped.order[place]] = u


@kernel
def gather_rows(
    records: Stored, rows: NDArray[np.int64], out: Records, start: int, stop: int
) -> None:
    """Copy the weights of ``rows[start:stop]`` to ``out`` ``[U, D]``, as float32."""
    dim = out.shape[1]
    last = len(rows) - 1
    floats = (dim * records.itemsize + 3) // 4
    is_long = floats > MAX_SHORT_DIM
    for u in range(start, stop):
        prefetch_row(records, rows[min(u + ROWS_AHEAD, last)], floats, is_long)
        row = rows[u]
        for d in range(dim):
            out[u, d] = widened(records[row, d])


@kernel
def scatter_rows(
    given: Records, rows: NDArray[np.int64], records: Records, start: int, stop: int
) -> None:
    """Copy ``given[start:stop]`` to the distinct ``rows[start:stop]`` of ``records``."""
    width = given.shape[1]
    last = len(rows) - 1
    is_long = width > MAX_SHORT_DIM
    for u in range(start, stop):
        prefetch_row(records, rows[min(u + ROWS_AHEAD, last)], width, is_long)
        row = rows[u]
        for d in range(width):
            records[row, d] = given[u, d]
