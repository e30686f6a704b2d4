"""Where a plan puts every row, cut into lanes: a lane holds all blocks of columns of one width.

Within a lane the shards lie end to end, so that an **address** (shard, offset) is one integer: the
shard's first address plus the offset. Rows that every shard holds come first in each, at the same
offsets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pibroch.config.exchange import OWNERS_POOL
from pibroch.embedding import Piece, RowSpace, Table
from pibroch.embedding.dtype import Dtype
from pibroch.embedding.row_index import ReaderIndices
from pibroch.errors import ConfigError
from pibroch.exchange.rows import Readers
from pibroch.kernels.route import Homes
from pibroch.planner import Placement, Plan
from pibroch.planner.row_map import RowMap


@dataclass(frozen=True, slots=True)
class Block:
    """Some columns of a table, with the shard of each part of it.

    Attributes:
        table: whose columns these are.
        columns: which ones.
        homes: parts that one shard holds.
        copies: of the rows that every shard holds, its own.
        owner_pools: whether owners pool.
        row_map: where rows have homes of their own.
        shards: then, where each of its shards is.
    """

    table: Table
    columns: range
    homes: tuple[tuple[int, Piece], ...]
    copies: tuple[tuple[int, Piece], ...]
    owner_pools: bool
    row_map: RowMap | None = None
    shards: tuple[int, ...] = ()

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
        index: from their ids to rows.
        homes: for each of them where rows lie.
        pieces: of each shard, replicated ones first.
        bounds: int64 ``[W + 1]``, each shard's first address.
        num_replicated: rows that every shard holds, the first of each.
        owners_pool: whether bags and pooled vectors travel; features then stand in the order of
            their owners.
        readers_of_shard: places in ``features`` of those whose tables, or some rows of them, each
            shard holds.
    """

    width: int
    dtype: Dtype
    features: tuple[str, ...]
    places: tuple[int, ...]
    first_columns: tuple[int, ...]
    readers: Readers
    index: ReaderIndices
    homes: Homes
    pieces: tuple[tuple[Piece, ...], ...]
    bounds: NDArray[np.int64]
    num_replicated: int
    owners_pool: bool
    readers_of_shard: tuple[tuple[int, ...], ...]

    @property
    def num_features_of_shard(self) -> tuple[int, ...]:
        """Features whose tables, or some rows of them, each shard holds."""
        return tuple(map(len, self.readers_of_shard))

    @property
    def cuts_bags(self) -> bool:
        """Whether rows of a bag may lie on several shards."""
        return sum(self.num_features_of_shard) > len(self.features)


def plan_for(
    tables: Sequence[Table], placement: str | Mapping[str, str] | Plan, num_shards: int, what: str
) -> Plan:
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
        raise ConfigError(
            f"a plan for {plan.num_shards} shards", f"one for {num_shards}, the number of {what}"
        )
    return plan


def behind(plan: Plan, num_trainers: int) -> Plan:
    """The same plan for shards that come after those of trainers, which have none."""
    placements = {
        name: Placement(kind=each.kind, shards=tuple(shard + num_trainers for shard in each.shards))
        for name, each in plan.placements.items()
    }
    return plan.model_copy(
        update={"num_shards": num_trainers + plan.num_shards, "placements": placements}
    )


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
    homes = plan.homes(table)
    copies = plan.copies(table)
    if kind == "column_wise":
        return [Block(table, piece.columns, ((shard, piece),), (), False) for shard, piece in homes]
    owner_pools = kind in OWNERS_POOL and table.pooling != "none"
    row_map = plan.row_map if kind == "rows" else None
    shards = plan.placements[table.name].shards
    return [
        Block(table, range(table.dim), tuple(homes), tuple(copies), owner_pools, row_map, shards)
    ]


def _lane(space: RowSpace, blocks: list[Block], num_shards: int, rank: int) -> LaneLayout:
    pieces: list[list[Piece]] = [[] for _ in range(num_shards)]
    sizes = [0] * num_shards
    first_row: dict[tuple[tuple[str, int], int, bool], int] = {}
    for are_copies in (True, False):  # copies first, at equal offsets
        for block in blocks:
            for shard, piece in block.copies if are_copies else block.homes:
                first_row[block.key, shard, are_copies] = sizes[shard]
                pieces[shard].append(piece)
                sizes[shard] += len(piece.rows)
    bounds = np.cumsum([0, *sizes], dtype=np.int64)
    address = {key: int(bounds[key[1]]) + first for key, first in first_row.items()}
    owners_pool = blocks[0].owner_pools
    if owners_pool:  # so that what goes to one owner is one span of a batch's bags
        blocks = sorted(blocks, key=lambda block: block.homes[0][0])
    readers = [(feature, block) for block in blocks for feature in block.table.features]
    first_place = dict(
        zip(
            space.first_row,
            np.cumsum([0, *(len(table.features) for table in space.tables)]),
            strict=False,
        )
    )
    shards_of_reader = [frozenset(shard for shard, _ in block.homes) for _, block in readers]
    return LaneLayout(
        width=len(blocks[0].columns),
        dtype=space.dtype,
        features=tuple(feature for feature, _ in readers),
        places=tuple(
            first_place[b.table.name] + place
            for b in blocks
            for place in range(len(b.table.features))
        ),
        first_columns=tuple(block.columns.start for _, block in readers),
        readers=Readers(
            len(readers),
            _averaged([block.table.pooling == "mean" for _, block in readers]),
            space.is_pooled,
            len(readers) > len(blocks),
        ),
        index=ReaderIndices(
            [feature for feature, _ in readers],
            [space.indices[block.table.name] for _, block in readers],
        ),
        homes=_homes([block for _, block in readers], address, rank),
        pieces=tuple(tuple(held) for held in pieces),
        bounds=bounds,
        num_replicated=sum(len(piece.rows) for block in blocks for _, piece in block.copies[:1]),
        owners_pool=owners_pool,
        readers_of_shard=tuple(
            tuple(n for n, held in enumerate(shards_of_reader) if shard in held)
            for shard in range(num_shards)
        ),
    )


def _averaged(means: Sequence[bool]) -> NDArray[np.bool_] | None:
    return np.array(means, np.bool_) if any(means) else None


def _homes(
    blocks: Sequence[Block], address: Mapping[tuple[tuple[str, int], int, bool], int], rank: int
) -> Homes:
    """Where the rows of each reader's block lie for a rank.

    Its own copy is the home of a row that every shard holds.
    """
    first_addresses = []
    mapped = next((block.row_map for block in blocks if block.row_map), None)
    for block in blocks:
        own = address.get((block.key, rank, True), 0)
        if block.row_map is None:
            firsts = [address[block.key, shard, False] for shard, _ in block.homes] or [own]
        else:
            firsts = [*(address.get((block.key, shard, False), 0) for shard in block.shards), own]
        first_addresses.append(firsts)
    most = max(len(firsts) for firsts in first_addresses)
    return Homes(
        np.array([block.table.num_rows for block in blocks], np.int64),
        np.array([len(firsts) for firsts in first_addresses], np.uint32),
        np.array([[*firsts, *[0] * (most - len(firsts))] for firsts in first_addresses], np.int64),
        np.array(
            [-1 if b.row_map is None else b.row_map.first_row(b.table.name) for b in blocks],
            np.int64,
        ),
        np.empty(0, np.uint16) if mapped is None else mapped.partition,
        np.empty(0, np.uint32) if mapped is None else mapped.index,
        np.empty(0, np.int64) if mapped is None else mapped.place_of,
    )
