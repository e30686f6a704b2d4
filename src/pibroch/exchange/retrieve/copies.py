"""Copies that a plan puts on some ranks: one a host, of weights alone, which all its ranks read.

They are for inference.

A row whose home is on this host, or that every rank has, needs none. Of others one rank of the host
that is to have a copy holds it, in memory of its own after the lane's shards: its address is that
of no shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pibroch.embedding.dtype import Dtype, weight_floats
from pibroch.errors import ConfigError
from pibroch.exchange.layout import LaneLayout
from pibroch.kernels.arrays import Ints
from pibroch.kernels.route import Homes
from pibroch.planner.cost import holders
from pibroch.planner.plan import Plan
from pibroch.planner.row_map import RowMap

NOBODY = -1


@dataclass(frozen=True, slots=True)
class HostCopies:
    """Which rank of this host has a copy of which rows.

    Attributes:
        row_map: of the plan.
        ranks: of this host, H.
        holder: of each partition, among ``ranks``; NOBODY where it has none.
        number: uint32 ``[N]``: of a row with a copy its number among those of its table and holder,
            else that of the map.
    """

    row_map: RowMap
    ranks: tuple[int, ...]
    holder: Ints
    number: NDArray[np.uint32]

    @classmethod
    def of(cls, plan: Plan, hosts: Sequence[int], rank: int) -> HostCopies | None:
        """For the host of a rank; ``None`` where the plan has no copies for it."""
        row_map = plan.row_map
        ranks = tuple(p for p in range(len(hosts)) if hosts[p] == hosts[rank])
        if row_map is None or row_map.num_shards != len(hosts):
            return None
        held = holders(row_map.home, row_map.copies)
        may = held[:, ranks] & ~(held.all(axis=1) | np.isin(row_map.home, ranks))[:, None]
        if not may.any():
            return None
        for table, placement in plan.placements.items():
            if placement.kind == "rows" and placement.shards != tuple(range(len(hosts))):
                raise ConfigError(
                    f"shards {list(placement.shards)} of table {table!r}",
                    "those of the ranks, in order",
                )
        # hot partitions, which may follow each other, spread
        turn = np.arange(len(may)) % np.maximum(1, may.sum(axis=1))
        chosen = np.argmax(np.cumsum(may, axis=1) > turn[:, None], axis=1)
        copies = cls(
            row_map, ranks, np.where(may.any(axis=1), chosen, NOBODY), row_map.index.copy()
        )
        for table in row_map.num_rows:
            for holder in range(len(ranks)):
                rows = copies.rows(table, holder)
                copies.number[row_map.first_row(table) + rows] = np.arange(len(rows))
        return copies

    def rows(self, table: str, holder: int) -> Ints:
        """Ids of a table's rows that a holder has, rising."""
        return np.flatnonzero(
            self.holder[self.row_map.partition[self.row_map.rows_of(table)]] == holder
        )


@dataclass(frozen=True, slots=True)
class LaneCopies:
    """The copies that this host has of a lane's rows.

    Attributes:
        homes: as the lane's, with addresses of copies where there are some.
        bounds: int64 ``[W + H + 1]``, first address of each shard, then of each holder's copies.
        sources: of each holder, addresses of its rows by the lane's own homes, in the order of its
            copies.
        dtype: of the weights.
    """

    homes: Homes
    bounds: Ints
    sources: tuple[Ints, ...]
    dtype: Dtype

    @classmethod
    def of(cls, copies: HostCopies, layout: LaneLayout, is_exact: bool) -> LaneCopies | None:
        """The copies of a lane's rows; ``None`` where none has one.

        Weights that travel in a narrow type are kept as they arrive.
        """
        homes = layout.homes
        tables = _readers(layout, copies.row_map)
        num_holders = len(copies.ranks)
        num_parts = homes.first_address.shape[1]
        firsts = np.zeros((len(layout.features), num_parts + num_holders), np.int64)
        firsts[:, :num_parts] = homes.first_address
        bounds = layout.bounds.tolist()
        sources = []
        for holder in range(num_holders):
            parts = [layout.bounds[:0]]
            for table, features in tables.items():
                rows = copies.rows(table, holder)
                firsts[features, num_parts + holder] = bounds[-1] + sum(map(len, parts))
                parts.append(_addresses(homes, features[0], rows))
            sources.append(np.concatenate(parts))
            bounds.append(bounds[-1] + len(sources[-1]))
        if bounds[-1] == layout.bounds[-1]:
            return None
        place = np.where(copies.holder == NOBODY, homes.part_of, num_parts + copies.holder)
        extended = homes._replace(
            first_address=firsts, number=copies.number, part_of=place.astype(np.int64)
        )
        return cls(
            extended,
            np.array(bounds, np.int64),
            tuple(sources),
            layout.dtype if is_exact else "float32",
        )

    def width(self, dim: int) -> int:
        """Floats of a row."""
        return weight_floats(dim, self.dtype)


def _readers(layout: LaneLayout, row_map: RowMap) -> dict[str, list[int]]:
    """Tables whose rows have homes of their own, with the places of the features that read them."""
    names = {row_map.first_row(table): table for table in row_map.num_rows}
    readers: dict[str, list[int]] = {}
    for feature, first in enumerate(layout.homes.first_mapped.tolist()):
        if first >= 0:
            readers.setdefault(names[first], []).append(feature)
    return readers


def _addresses(homes: Homes, feature: int, rows: Ints) -> Ints:
    mapped = homes.first_mapped[feature] + rows
    part = homes.part_of[homes.partition[mapped].astype(np.int64)]
    addresses: Ints = homes.first_address[feature, part] + homes.number[mapped].astype(np.int64)
    return addresses
