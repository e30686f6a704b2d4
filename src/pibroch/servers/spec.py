"""What a server has to hold, as plain data.

Pieces of tables, how their weights begin, and their optimizer. Classes go by the names that
registries have for them; to import what it was not started with, a server refuses.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pibroch.config.initializer import INITIALIZERS
from pibroch.config.optimizer import SPARSE_OPTIMIZERS
from pibroch.config.registry import Registry
from pibroch.embedding import Frozen, Initializer, MemoryShard, Piece, SparseOptimizer, Table
from pibroch.embedding.dtype import Dtype
from pibroch.embedding.row_set import ListedRows, RowSet
from pibroch.errors import ConfigError
from pibroch.kernels.arrays import Ints

FROZEN = "frozen"
"""The optimizer of tables that do not learn, which recipes do not choose."""

Plain = dict[str, Any]
Named = list[str | Plain]
"""A class by its name in a registry, and its fields."""


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """A shard to be.

    Attributes:
        tables: name, rows, dim, name and fields of the initializer of each.
        pieces: of the shard, in their order: number of the table; start, stop and step of its rows,
            or of rows that a plan chose one by one how many they are and their checksum: their ids
            go beside, see :func:`listed_rows`.
        optimizer: its name and fields.
        seed: of the initial weights; ``None`` where somebody writes all rows.
        dtype: of the weights in memory.
    """

    tables: list[Plain]
    pieces: list[list[int]]
    optimizer: Named
    seed: int | None
    dtype: Dtype = "float32"

    @classmethod
    def of(
        cls,
        pieces: Sequence[Piece],
        optimizer: SparseOptimizer,
        seed: int | None,
        dtype: Dtype = "float32",
    ) -> ShardSpec:
        """What a shard of these pieces needs.

        Raises:
            ConfigError: for an optimizer or initializer that has no name for others.
        """
        tables = list(dict.fromkeys(piece.table.name for piece in pieces))
        plain_tables = {piece.table.name: _plain(piece.table) for piece in pieces}
        rows = [[tables.index(piece.table.name), *_plain_rows(piece.rows)] for piece in pieces]
        if isinstance(optimizer, Frozen):
            named: Named = [FROZEN, asdict(optimizer)]
        else:
            named = _named(optimizer, SPARSE_OPTIMIZERS)
        return cls([plain_tables[name] for name in tables], rows, named, seed, dtype)

    def build(self, dim: int, listed: Sequence[Tensor] = ()) -> tuple[MemoryShard, SparseOptimizer]:
        """The shard with its initial weights, ``dim`` in a row, and the optimizer.

        ``listed`` as from :func:`listed_rows`.

        Raises:
            ConfigError: for what cannot be, or is not known here.
        """
        try:
            tables = [
                Table(
                    each["name"],
                    each["num_rows"],
                    each["dim"],
                    initializer=_made(each["initializer"], INITIALIZERS, Initializer),
                    dtype=self.dtype,
                )
                for each in self.tables
            ]
            ids = iter(listed)
            pieces = [
                Piece(tables[n], _rows(rows, ids), range(tables[n].dim)) for n, *rows in self.pieces
            ]
            name, fields = self.optimizer
            optimizer: SparseOptimizer = (
                Frozen(**fields)
                if name == FROZEN and isinstance(fields, dict)
                else _made(self.optimizer, SPARSE_OPTIMIZERS, SparseOptimizer)
            )
        except (KeyError, IndexError, TypeError, ValueError, StopIteration) as error:
            raise ConfigError(
                f"a shard that cannot be made: {error}", "tables, pieces and an optimizer"
            ) from error
        for piece in pieces:
            if len(piece.rows) and not (
                piece.rows[0] >= 0 and piece.rows[-1] < piece.table.num_rows
            ):
                raise ConfigError(
                    f"rows {piece.rows} of table {piece.table.name!r}", "rows that the table has"
                )
            if piece.table.dim != dim:
                raise ConfigError(
                    f"table {piece.table.name!r} of dim {piece.table.dim}", f"dim {dim}"
                )
        return MemoryShard(pieces, dim, optimizer, self.seed, dtype=self.dtype), optimizer


def listed_rows(pieces: Sequence[Piece]) -> list[Tensor]:
    """Ids of the rows that a plan chose one by one, int64, in the order of the pieces."""
    return [
        torch.from_numpy(piece.rows.ids) for piece in pieces if isinstance(piece.rows, ListedRows)
    ]


def _plain_rows(rows: RowSet) -> list[int]:
    if isinstance(rows, ListedRows):
        return [len(rows), _checksum(rows.ids)]
    return [rows.start, rows.stop, rows.step]


def _rows(plain: Sequence[int], listed: Iterator[Tensor]) -> RowSet:
    if len(plain) == 3:
        return range(*plain)
    ids = next(listed).numpy()
    if (
        ids.dtype != np.int64
        or [len(ids), _checksum(ids)] != list(plain)
        or (np.diff(ids) <= 0).any()
    ):
        raise ValueError("other ids of rows than were announced, or ids that do not rise")
    return ListedRows.of(ids)


def _checksum(ids: Ints) -> int:
    return zlib.crc32(np.ascontiguousarray(ids).data)


def _plain(table: Table) -> Plain:
    initializer = _named(table.initializer, INITIALIZERS)
    return {
        "name": table.name,
        "num_rows": table.num_rows,
        "dim": table.dim,
        "initializer": initializer,
    }


def _named(value: Any, registry: Registry[Any]) -> Named:
    kind = type(value)
    name = registry.name_of(kind)
    if name is None or not is_dataclass(value) or isinstance(value, type):
        raise ConfigError(
            f"the {registry.kind} {kind.__module__}:{kind.__name__}, which servers cannot make",
            f"one of {sorted(registry.all())}, or a dataclass of a module that has its `section`",
            "give the class a `section`, or train without servers",
        )
    return [name, asdict(value)]


def _made(named: Named, registry: Registry[Any], kind: type[Any]) -> Any:
    name, fields = named
    if not isinstance(name, str) or not isinstance(fields, dict):
        raise TypeError("no name and fields")
    try:
        spec = registry.find(name)
    except ConfigError as error:
        module = name.partition(":")[0]
        raise ConfigError(
            f"{registry.kind} {name!r} for an embedding server that does not have it",
            "one of pibroch's own, of a distribution that is installed there, or of a module that"
            " the server was started with",
            f"if you trust it, start the server by `pibroch --import {module} embedding-server`",
        ) from error
    made = spec.build(**fields)
    if not isinstance(made, kind):
        raise TypeError(f"{name!r} makes a {type(made).__name__}")
    return made
