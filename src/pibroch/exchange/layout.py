"""Where a plan puts every row, cut into lanes: a lane holds all blocks of columns of one width.

Within a lane the shards lie end to end, so that an **address** (shard, offset) is one integer: the shard's first address plus
the offset. Replicated blocks come first in every shard, at the same offsets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pibroch.embedding import Piece, RowSpace, Table
from pibroch.embedding.dtype import Dtype
from pibroch.errors import ConfigError
from pibroch.exchange.rows import Readers
from pibroch.kernels.route.numba import Homes
from pibroch.planner import Placement, Plan


@dataclass(frozen=True, slots=True)
class Block:
    """Some columns of a table, with the shard and rows of each part of it; a replicated block has one part and no shard."""

    table: Table
    columns: range
    parts: tuple[tuple[int, Piece], ...]
    is_replicated: bool
    owner_pools: bool

    @property
    def key(self) -> tuple[str, int]:
        """Table and first column."""
        return self.table.name, self.columns.start


@dataclass(frozen=True, slots=True)
class LaneLayout:
    """One width's blocks over all shards, seen from one rank.

    Attributes:
        width: weights in a record.
        dtype: of them.
        features: names of the features that read a block, in the order in which they are looked up.
        places: for each of them its place among the row space's features.
        first_columns: for each of them the first column of its block.
        readers: how they read.
        homes: for each of them where rows lie.
        pieces: of each shard, replicated ones first.
        bounds: int64 ``[W + 1]``, each shard's first address.
        num_replicated: rows of replicated blocks.
        owners_pool: whether bags and pooled vectors travel; features then stand in the order of their owners.
        num_features_of_shard: in a pooled lane, features whose tables each shard holds.
    """

    width: int
    dtype: Dtype
    features: tuple[str, ...]
    places: tuple[int, ...]
    first_columns: tuple[int, ...]
    readers: Readers
    homes: Homes
    pieces: tuple[tuple[Piece, ...], ...]
    bounds: NDArray[np.int64]
    num_replicated: int
    owners_pool: bool
    num_features_of_shard: tuple[int, ...]


def plan_for(tables: Sequence[Table], placement: str | Mapping[str, str] | Plan, num_shards: int, what: str) -> Plan:
    """The plan that a placement means.

    Args:
        tables: all.
        placement: a kind for all tables, kinds by table, or a plan.
        num_shards: that there are.
        what: they are, for the error.

    Raises:
        ConfigError: for a plan that does not fit.
    """
    plan = placement if isinstance(placement, Plan) else Plan.of(tables, num_shards, placement)
    plan.check(tables)
    if plan.num_shards != num_shards:
        raise ConfigError(f"a plan for {plan.num_shards} shards", f"one for {num_shards}, the number of {what}")
    return plan


def behind(plan: Plan, num_trainers: int) -> Plan:
    """The same plan for shards that come after those of trainers, which have none."""
    placements = {
        name: Placement(kind=each.kind, shards=tuple(shard + num_trainers for shard in each.shards))
        for name, each in plan.placements.items()
    }
    return Plan(num_shards=num_trainers + plan.num_shards, placements=placements)


def lay_out(space: RowSpace, plan: Plan, rank: int) -> list[LaneLayout]:
    """The lanes of one row space under a plan for all tables, widest first, as ``rank`` sees them.

    Its own copy is the home of a replicated row.
    """
    blocks = [block for table in space.tables for block in _blocks(table, plan)]
    kinds = sorted({(block.owner_pools, -len(block.columns)) for block in blocks})
    chosen = [[b for b in blocks if (b.owner_pools, -len(b.columns)) == kind] for kind in kinds]
    return [_lane(space, alike, plan.num_shards, rank) for alike in chosen]


def _blocks(table: Table, plan: Plan) -> list[Block]:
    kind = plan.placements[table.name].kind
    pieces = plan.pieces(table)
    if kind == "column_wise":
        return [Block(table, piece.columns, ((shard, piece),), False, False) for shard, piece in pieces]
    owner_pools = kind == "table_wise_pooled" and table.pooling != "none"
    return [Block(table, range(table.dim), tuple(pieces), kind == "replicated", owner_pools)]


def _lane(space: RowSpace, blocks: list[Block], num_shards: int, rank: int) -> LaneLayout:
    pieces: list[list[Piece]] = [[] for _ in range(num_shards)]
    sizes = [0] * num_shards
    offset_of: dict[tuple[tuple[str, int], int], int] = {}
    for block in sorted(blocks, key=lambda block: not block.is_replicated):  # replicated ones first, at equal offsets
        for shard, piece in block.parts:
            offset_of[block.key, shard] = sizes[shard]
            pieces[shard].append(piece)
            sizes[shard] += len(piece.rows)
    bounds = np.cumsum([0, *sizes], dtype=np.int64)
    owners_pool = blocks[0].owner_pools
    if owners_pool:  # so that what goes to one owner is one span of a batch's bags
        blocks = sorted(blocks, key=lambda block: block.parts[0][0])
    readers = [(feature, block) for block in blocks for feature in block.table.features]
    first_place = dict(
        zip(space.first_row, np.cumsum([0, *(len(table.features) for table in space.tables)]), strict=False)
    )
    homes = [[rank] if block.is_replicated else [shard for shard, _ in block.parts] for _, block in readers]
    # row r of a reader lies in part r % k, at offset r // k behind the first address of its block there
    first_address = np.zeros((len(readers), max(len(shards) for shards in homes)), np.int64)
    for reader, (_, block) in enumerate(readers):
        for part, shard in enumerate(homes[reader]):
            first_address[reader, part] = bounds[shard] + offset_of[block.key, shard]
    return LaneLayout(
        width=len(blocks[0].columns),
        dtype=space.dtype,
        features=tuple(feature for feature, _ in readers),
        places=tuple(first_place[b.table.name] + place for b in blocks for place in range(len(b.table.features))),
        first_columns=tuple(block.columns.start for _, block in readers),
        readers=Readers(
            len(readers),
            np.array([block.table.pooling == "mean" for _, block in readers], np.bool_),
            space.is_pooled,
            len(readers) > len(blocks),
        ),
        homes=Homes(
            np.array([block.table.num_rows for _, block in readers], np.int64),
            np.array([len(shards) for shards in homes], np.uint32),
            first_address,
        ),
        pieces=tuple(tuple(held) for held in pieces),
        bounds=bounds,
        num_replicated=sum(block.table.num_rows for block in blocks if block.is_replicated),
        owners_pool=owners_pool,
        num_features_of_shard=tuple(sum(shard in shards for shards in homes) for shard in range(num_shards)),
    )
