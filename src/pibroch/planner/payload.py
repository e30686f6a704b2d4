"""Bytes that a step of the exchange ``alltoall`` sends from rank to rank under a plan, predicted from a profile.

A row that a rank reads costs once a step, however often the rank reads it: its number to the owner, its weights back, and its
gradient there again; a rank's own rows cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

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
    for table in tables:
        if plan.placements[table.name].kind == "table_wise_pooled":
            raise ConfigError(f"table {table.name!r} whose owner pools", "a placement whose rows travel")
        share = profile.tables[table.name].batches / profile.num_batches
        for owner, piece in plan.homes(table):
            rows, floats = float(share[ids_of(piece.rows)].sum()), FLOAT_BYTES * len(piece.columns)
            sent[:, owner] += rows * (ID_BYTES + trains * floats)
            sent[owner] += rows * floats
        for _, piece in plan.copies(table)[:1]:
            copied, floats = share[ids_of(piece.rows)], ID_BYTES + FLOAT_BYTES * table.dim
            if not trains:
                continue
            if replicas == "gather":
                sent += float(copied.sum()) * floats
            else:  # owners take turns, so that each has about the same of them
                sent += float(copied.sum() + distinct(copied, size).sum()) / size * floats
    np.fill_diagonal(sent, 0.0)
    return sent
