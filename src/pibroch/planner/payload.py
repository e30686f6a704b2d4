"""Bytes that a step of the exchange ``alltoall`` sends from rank to rank under a plan, predicted from a profile.

A row that a rank reads costs once a step, however often the rank reads it: its number to the owner, its weights back, and its
gradient there again; a rank's own rows cost nothing. Numbers of copied rows are bits where most are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pibroch.config.exchange import BITS_AT_ONCE, OWNERS_POOL
from pibroch.embedding import Table
from pibroch.embedding.row_set import ids_of
from pibroch.errors import ConfigError
from pibroch.planner.cost import Floats, distinct
from pibroch.planner.plan import Plan
from pibroch.planner.profile import AccessProfile

Replicas = Literal["gather", "sparse"]
ID_BYTES, FLOAT_BYTES = 4, 4
HEAD_BYTES = 4 * 8
"""Of the counts that each rank sends to each other for every group of tables."""


def step_payload(
    plan: Plan, tables: Sequence[Table], profile: AccessProfile, *, replicas: Replicas = "gather", num_groups: int = 1,
    trains: bool = True,
) -> Floats:  # fmt: skip
    """Expected bytes that rank i sends to rank j in a step, ``[W, W]``; float32 travels, dense gradients are left out.

    Args:
        plan: of all tables; rows are placed, not pooled by their owners.
        tables: that it places.
        profile: of the same tables, counted in batches of one rank's size.
        replicas: how gradients of copied rows are summed, see :mod:`pibroch.exchange.alltoall.copies`.
        num_groups: of tables, each of which sends counts of its own.
        trains: with gradients.

    Raises:
        ConfigError: for a plan that does not fit, or owners that pool.
        DataError: for a profile of other tables.
    """
    plan.check(tables)
    profile.check(tables)
    size = plan.num_shards
    sent = np.full((size, size), float(HEAD_BYTES * num_groups))
    copies: dict[int, _Copies] = {}
    for table in tables:
        if plan.placements[table.name].kind in OWNERS_POOL:
            raise ConfigError(
                f"table {table.name!r} whose owner pools", "a placement whose rows travel"
            )
        share = profile.tables[table.name].batches / profile.num_batches
        for owner, rows, num_columns in _owned(plan, table, share):
            floats = FLOAT_BYTES * num_columns
            sent[:, owner] += rows * (ID_BYTES + trains * floats)
            sent[owner] += rows * floats
        for _, piece in plan.copies(table)[:1]:
            copied = copies.setdefault(table.dim, _Copies(size))
            copied.add(share[ids_of(piece.rows)])
    if trains:
        for dim, copied in copies.items():
            sent += copied.gathered(dim) if replicas == "gather" else copied.summed(dim)
    np.fill_diagonal(sent, 0.0)
    return sent


def _owned(plan: Plan, table: Table, share: Floats) -> Iterator[tuple[int, float, int]]:
    """By owner: how many of its rows a rank reads a step, and how many of their columns it has."""
    placement, row_map = plan.placements[table.name], plan.row_map
    if placement.kind != "rows":
        for owner, piece in plan.homes(table):
            yield owner, float(share[ids_of(piece.rows)].sum()), len(piece.columns)
        return
    # one pass over the rows for all owners, of which there may be a thousand
    assert row_map is not None, "checked with the plan"
    partition = row_map.partition[row_map.rows_of(table.name)]
    read = np.bincount(partition, share, len(row_map.home))
    at_place = np.bincount(row_map.place_of, read, row_map.num_shards + 1)
    for shard, owner in enumerate(placement.shards):
        if at_place[shard]:
            yield owner, float(at_place[shard]), table.dim


@dataclass(slots=True)
class _Copies:
    """Copied rows of one width, as far as a link is concerned.

    Attributes:
        size: W.
        num_rows: there are.
        read: by a rank a step, expected.
        heard: by any rank.
    """

    size: int
    num_rows: int = 0
    read: float = 0.0
    heard: float = 0.0

    def add(self, share: Floats) -> None:
        """Rows by how often a rank's batch reads them."""
        self.num_rows += len(share)
        self.read += float(share.sum())
        self.heard += float(distinct(share, self.size).sum())

    def gathered(self, dim: int) -> float:
        """Bytes on each link where ranks send each other all gradients."""
        return self.read * FLOAT_BYTES * dim + ID_BYTES * min(self.read, _words(self.num_rows))

    def summed(self, dim: int) -> float:
        """Bytes on each link where owners sum; they take turns, so that each has about the same of them."""
        words, read, heard = (
            _words(self.num_rows / self.size),
            self.read / self.size,
            self.heard / self.size,
        )
        ids = min(read, words) + (words if words <= BITS_AT_ONCE else heard)
        return (read + heard) * FLOAT_BYTES * dim + ID_BYTES * ids


def _words(num_rows: float) -> float:
    """Numbers as long as an id that hold a bit for each row."""
    return float(np.ceil(num_rows / (8 * ID_BYTES)))
