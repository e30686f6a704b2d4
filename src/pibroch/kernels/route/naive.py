"""What the route kernels mean, without a thought of speed."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.arrays import Array
from pibroch.kernels.scatter_update.numba import Grouped


def resolve_addresses(
    values: Array, offsets: Array, homes: Any, addresses: NDArray[np.int64]
) -> int:
    """Write the address of each value; return the position of the first id out of range, or -1."""
    num_samples = (len(offsets) - 1) // len(homes.num_rows)
    for position, value in enumerate(values.tolist()):
        feature = (int(np.searchsorted(offsets, position, side="right")) - 1) // num_samples
        if not 0 <= value < homes.num_rows[feature]:
            return position
        if homes.first_mapped[feature] >= 0:
            place = int(homes.first_mapped[feature]) + value
            row = int(homes.number[place])
            part = int(homes.part_of[homes.partition[place]])
        else:
            row, part = divmod(value, int(homes.num_parts[feature]))
        addresses[position] = homes.first_address[feature, part] + row
    return -1


def places(grouped: Grouped) -> NDArray[np.int64]:
    """For each position the number of its row among the distinct ones."""
    out = np.empty(len(grouped.order), np.int64)
    for u in range(len(grouped.rows)):
        out[grouped.order[grouped.segments[u] : grouped.segments[u + 1]]] = u
    return out


def scatter_rows(given: NDArray[Any], rows: NDArray[np.int64], records: NDArray[Any]) -> None:
    """Row ``rows[u]`` of ``records`` becomes row u of ``given``."""
    records[rows] = given[: len(rows)]
