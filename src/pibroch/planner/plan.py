"""A plan says which shard holds which part of which table.

Ranks hold a shard each; a file outlives them.

Kinds of placement:

- *table-wise*: one shard holds the whole table. Rows travel, each distinct one once; or,
  *table-wise, pooled*, bags do and come back as one vector: fewer bytes where bags are long and
  repeat little.
- *row-wise*: row r lies on shard ``shards[r % k]``, so that the hot rows at a vocabulary's
  beginning spread evenly. *Row-wise, pooled*: each shard pools what it has of a bag, and the reader
  adds k vectors a bag, which is a reduce-scatter.
- *column-wise*: shard ``shards[j]`` holds the j-th block of columns of every row.
- *replicated* (data-parallel): every shard holds the whole table.
- *rows*: each row has a home of its own, or copies on every shard, as a
  :class:`~pibroch.planner.row_map.RowMap` says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

from pibroch.config.exchange import PLACEMENTS, PlacementKind
from pibroch.embedding import Piece, Table
from pibroch.errors import ConfigError
from pibroch.kernels.arrays import Array
from pibroch.planner.assignment import Assignment
from pibroch.planner.row_map import RowMap
from pibroch.planner.row_map_file import PLAN, open_row_map, write_row_map
from pibroch.state.files import FileDigest
from pibroch.untrusted import CHECKSUM, checked, read_json, read_manifest, write_manifest

ROWS_A_BATCH = 4096
"""Distinct rows that a minibatch asks of a large table, about.

What a table costs its shard is traffic, not memory.
"""
MOST_SHARDS = 1 << 16
_ROWS = "rows"


class Placement(BaseModel):
    """Where one table lies.

    Attributes:
        kind: how it is cut.
        shards: that hold it; none for a replicated table, which lies everywhere. Where rows have
            homes of their own, shard s of the row map is ``shards[s]``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: PlacementKind | Literal["rows"]
    shards: tuple[int, ...] = ()


class Plan(BaseModel):
    """Placements by table name, over ``num_shards`` shards.

    Attributes:
        num_shards: ranks, or servers.
        placements: by table name.
        made_from: what whoever made it noted: data, topology, costs predicted.
        row_map: of the tables whose rows have homes of their own; lies in a file beside the plan's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    num_shards: int
    placements: dict[str, Placement]
    made_from: dict[str, Any] = {}
    row_map: RowMap | None = Field(default=None, exclude=True)

    @field_validator("num_shards")
    @classmethod
    def _bounded(cls, num_shards: int) -> int:
        if not 1 <= num_shards <= MOST_SHARDS:
            raise ValueError(f"1 to {MOST_SHARDS} shards")
        return num_shards

    @classmethod
    def of(
        cls,
        tables: Sequence[Table],
        num_shards: int,
        placement: str | Mapping[str, str] = "row_wise",
    ) -> Self:
        """A plan by a kind of placement for all tables, or for each by name ("" for the rest).

        >>> tables = [Table("a", 5, 4), Table("b", 9, 4)]
        >>> plan = Plan.of(tables, 2, {"a": "replicated", "": "table_wise"})
        >>> plan.placements["b"].shards
        (0,)

        Raises:
            ConfigError: for an unknown kind or table.
        """
        kinds = {"": placement} if isinstance(placement, str) else {"": "row_wise", **placement}
        names = {table.name for table in tables}
        for name, kind in kinds.items():
            if name and name not in names:
                raise ConfigError(
                    f"a placement for table {name!r}", f"one of the tables {sorted(names)}"
                )
            if kind not in PLACEMENTS:
                raise ConfigError(f"placement {kind!r}", f"one of {', '.join(PLACEMENTS)}")
        load = [0] * num_shards
        placements = {}
        for table in sorted(tables, key=lambda table: (-table.num_rows, table.name)):
            kind = kinds.get(table.name, kinds[""])
            shards = _shards(table, kind, load)
            placements[table.name] = Placement.model_validate({"kind": kind, "shards": shards})
        return cls(
            num_shards=num_shards,
            placements={table.name: placements[table.name] for table in tables},
        )

    @classmethod
    def by_rows(cls, assignment: Assignment, made_from: Mapping[str, object] | None = None) -> Self:
        """A plan that gives each row the home and the copies of its partition.

        >>> partition = {"a": np.array([0, 1, 1], np.uint16)}
        >>> home = np.array([1, 0], np.uint16)
        >>> halves = Assignment(partition, home, np.zeros((2, 2), np.bool_))
        >>> plan = Plan.by_rows(halves)
        >>> [(shard, piece.rows.ids.tolist()) for shard, piece in plan.homes(Table("a", 3, 4))]
        [(0, [1, 2]), (1, [0])]

        Raises:
            ConfigError: for an assignment that cannot be.
        """
        row_map = RowMap.of(assignment)
        shards = tuple(range(row_map.num_shards))
        placements = {table: Placement(kind="rows", shards=shards) for table in row_map.num_rows}
        return cls(
            num_shards=len(shards),
            placements=placements,
            made_from=dict(made_from or {}),
            row_map=row_map,
        )

    @property
    def digest(self) -> str:
        """Equal for plans that put all rows to the same places."""
        digest = sha256(json.dumps(self.model_dump(include={"num_shards", "placements"})).encode())
        if self.row_map is not None:
            for numbers in (self.row_map.partition, self.row_map.home, self.row_map.copies):
                digest.update(np.ascontiguousarray(numbers).data)
        return digest.hexdigest()

    def check(self, tables: Sequence[Table]) -> None:
        """Raise ConfigError unless the plan places exactly these tables on its shards."""
        names = {table.name for table in tables}
        if names != set(self.placements):
            odd = sorted(names ^ set(self.placements))[0]
            raise ConfigError(
                f"a plan for {len(self.placements)} tables that differ in {odd!r}",
                "one for these tables",
            )
        for table in tables:
            placement = self.placements[table.name]
            shards = placement.shards
            kind = placement.kind
            right = {
                "table_wise": len(shards) == 1,
                "table_wise_pooled": len(shards) == 1,
                "row_wise": len(shards) >= 1 and len(set(shards)) == len(shards),
                "row_wise_pooled": len(shards) >= 1 and len(set(shards)) == len(shards),
                "column_wise": len(shards) >= 1 and table.dim % len(shards) == 0,
                "replicated": not shards,
            }.get(kind)
            if kind == "rows":
                self._check_rows(table)
            elif not right or not all(0 <= shard < self.num_shards for shard in shards):
                raise ConfigError(
                    f"table {table.name!r} of dim {table.dim} placed {kind} on shards"
                    f" {list(shards)}",
                    f"shards from 0 to {self.num_shards - 1}: one (table-wise), distinct ones"
                    " (row-wise), as many as divide its dim (column-wise), or none (replicated)",
                )

    def _check_rows(self, table: Table) -> None:
        mapped_rows = {} if self.row_map is None else self.row_map.num_rows
        if self.row_map is None or mapped_rows.get(table.name) != table.num_rows:
            raise ConfigError(
                f"a plan for {mapped_rows.get(table.name, 0):,} rows of table {table.name!r}",
                f"one for its {table.num_rows:,} rows",
                "make a plan for these tables",
            )
        shards = self.placements[table.name].shards
        if sorted(set(shards)) != sorted(shards) or len(shards) != self.row_map.num_shards:
            raise ConfigError(
                f"shards {list(shards)} of table {table.name!r}",
                f"{self.row_map.num_shards} distinct ones",
            )
        if not all(0 <= shard < self.num_shards for shard in shards):
            raise ConfigError(
                f"shards {list(shards)} of table {table.name!r}", f"shards below {self.num_shards}"
            )

    def pieces(self, table: Table) -> list[tuple[int, Piece]]:
        """All parts of a table, each with its shard, copies included."""
        return self.copies(table) + self.homes(table)

    def copies(self, table: Table) -> list[tuple[int, Piece]]:
        """The rows of a table that every shard holds, once for each."""
        placement = self.placements[table.name]
        rows = range(table.num_rows)
        writer = list(self.placements).index(table.name) % self.num_shards
        if placement.kind == "replicated":
            return [
                (shard, Piece(table, rows, range(table.dim), shard == writer))
                for shard in range(self.num_shards)
            ]
        if (
            self.row_map is None
            or placement.kind != "rows"
            or not self.row_map.counts[table.name][-1]
        ):
            return []
        everywhere = self.row_map.rows_at(table.name, self.row_map.num_shards)
        return [
            (
                shard,
                Piece(
                    table,
                    everywhere,
                    range(table.dim),
                    shard == placement.shards[writer % len(placement.shards)],
                ),
            )
            for shard in placement.shards
        ]

    def homes(self, table: Table) -> list[tuple[int, Piece]]:
        """The parts of a table that one shard holds, each with its shard."""
        placement = self.placements[table.name]
        rows = range(table.num_rows)
        columns = range(table.dim)
        shards = placement.shards
        if placement.kind == "replicated":
            return []
        if placement.kind == "rows":
            assert self.row_map is not None, "checked"
            counts = self.row_map.counts[table.name]
            return [
                (shard, Piece(table, self.row_map.rows_at(table.name, place), columns))
                for place, shard in enumerate(shards)
                if counts[place]
            ]
        if placement.kind == "column_wise":
            width = table.dim // len(shards)
            return [
                (s, Piece(table, rows, columns[j * width : (j + 1) * width]))
                for j, s in enumerate(shards)
            ]
        return [(s, Piece(table, rows[j :: len(shards)], columns)) for j, s in enumerate(shards)]

    def save(self, path: Path, arrays: Mapping[str, Array] | None = None) -> None:
        """Write the plan as JSON with its checksum, and homes of single rows as ``<path>.rows``.

        Args:
            path: of the JSON.
            arrays: what else goes into ``<path>.rows``, for :func:`row_map_file.open_array`.
        """
        content = self.model_dump(mode="json")
        if self.row_map is not None:
            digest = write_row_map(rows_path(path), self.row_map, arrays or {})
            content[_ROWS] = asdict(digest)
        write_manifest(path, content)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a plan; homes of single rows are mapped, and shared by processes of a host.

        Raises:
            ConfigError: when there is none, or when it is no plan, or damaged.
        """
        if not path.exists():
            raise ConfigError(f"{path}, which is not there", "a plan", "make one with pibroch plan")
        content = read_json(path.parent, path.name, PLAN)
        if not isinstance(content, dict):
            raise PLAN(f"{path}, which is no plan", "a file that pibroch wrote as a plan")
        if CHECKSUM in content:  # plans of before there was one have none
            content, _ = read_manifest(path.parent, path.name, PLAN)
        digest = checked(FileDigest | None, content.pop(_ROWS, None), f"{path} at `rows`", PLAN)
        plan: Self = checked(cls, content, f"{path}, which is no plan", PLAN)
        if not any(placement.kind == "rows" for placement in plan.placements.values()):
            return plan
        return plan.model_copy(update={"row_map": open_row_map(rows_path(path), digest)})


def rows_path(path: Path) -> Path:
    """The file beside a plan that holds the homes of single rows."""
    return path.with_name(path.name + ".rows")


def _shards(table: Table, kind: str, load: list[int]) -> tuple[int, ...]:
    """Shards of one table; ``load`` counts what each shard has to serve so far and is updated."""
    num_shards = len(load)
    if kind == "replicated":
        return ()
    if kind in ("table_wise", "table_wise_pooled"):
        shard = min(range(num_shards), key=lambda s: (load[s], s))
        load[shard] += min(table.num_rows, ROWS_A_BATCH)
        return (shard,)
    if kind == "column_wise":
        blocks = max(k for k in range(1, num_shards + 1) if table.dim % k == 0)
        return tuple(range(blocks))
    return tuple(range(min(num_shards, table.num_rows)))
