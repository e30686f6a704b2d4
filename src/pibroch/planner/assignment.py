"""What a planner decides: groups of rows, a home for each, and copies of some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Assignment:
    """Homes and static replicas of all rows, partition by partition.

    A partition is a set of rows that are placed together (OPER, Sec. 4.1).

    Attributes:
        partition_of: by table, uint16 ``[num_rows]``: the partition of each row. A partition may
            have rows of several tables.
        home: uint16 ``[P]``: the shard that owns a partition's rows.
        copies: bool ``[P, num_shards]``: the shards besides the home that hold a replica of them.
        source: uint16 ``[P, num_shards]``: the shard from which each reads a partition; ``None``
            for the rule of :func:`pibroch.planner.cost.sources`.
    """

    partition_of: Mapping[str, NDArray[np.uint16]]
    home: NDArray[np.uint16]
    copies: NDArray[np.bool_]
    source: NDArray[np.uint16] | None = None

    @property
    def num_shards(self) -> int:
        """That rows are spread over."""
        return int(self.copies.shape[1])

    @property
    def is_everywhere(self) -> NDArray[np.bool_]:
        """Whether each of several shards has the rows of a partition, bool ``[P]``."""
        held = self.copies.copy()
        held[np.arange(len(self.home)), self.home] = True
        return np.asarray(held.all(axis=1) & (self.num_shards > 1))
