"""Tables of any kind, cut into groups of which all records look alike and are updated alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pibroch.embedding.columns import Columns, side_by_side
from pibroch.embedding.optimizers import Frozen, SparseOptimizer
from pibroch.embedding.row_index import RowIndex
from pibroch.embedding.row_space import RowSpace
from pibroch.embedding.table import Table, check_tables
from pibroch.errors import ConfigError

Optimizers = SparseOptimizer | Mapping[str, SparseOptimizer]


@dataclass(frozen=True, eq=False)
class TableGroup:
    """Tables with one row space and one optimizer.

    Attributes:
        space: of these tables.
        optimizer: of all their rows.
        places: of the space's readers, their places among the readers of all tables.
        columns: where these have their embeddings among those of all tables that are pooled;
            ``None`` where they are not.
    """

    space: RowSpace
    optimizer: SparseOptimizer
    places: tuple[int, ...]
    columns: Columns | None


def optimizers_of(tables: Sequence[Table], optimizer: Optimizers) -> dict[str, SparseOptimizer]:
    """Each table's optimizer.

    Args:
        tables: all.
        optimizer: of all tables, or by table name, ``""`` for those not named.

    Raises:
        ConfigError: for what is no sparse optimizer, a table without one, or one for a table that
            is not there.
    """
    chosen = dict(optimizer) if isinstance(optimizer, Mapping) else {"": optimizer}
    for each in chosen.values():
        if not isinstance(each, SparseOptimizer):
            raise ConfigError(
                f"a {type(each).__name__} as sparse optimizer",
                "one of pibroch's, e.g. pibroch.RowWiseAdagrad(lr=0.05)",
            )
    names = [table.name for table in tables]
    odd = [name for name in chosen if name and name not in names]
    if odd:
        raise ConfigError(
            f"an optimizer for table {odd[0]!r}", f"one of the tables {sorted(names)}"
        )
    without = [name for name in names if name not in chosen]
    if without and "" not in chosen:
        raise ConfigError(
            f"no optimizer for table {without[0]!r}",
            "one for each table",
            'name one "" for all tables that are not named',
        )
    return {name: chosen[name] if name in chosen else chosen[""] for name in names}


def group_tables(
    tables: Sequence[Table],
    optimizer: Optimizers,
    indices: Mapping[str, RowIndex] | None = None,
) -> tuple[TableGroup, ...]:
    """The groups of tables of any dims, in the order of their first tables.

    Args:
        tables: with distinct names.
        optimizer: of all tables, or by table name, ``""`` for those not named.
        indices: see :class:`~pibroch.embedding.RowSpace`.

    Raises:
        ConfigError: for tables or optimizers that cannot be.

    Example:
        >>> from pibroch.embedding import SGD
        >>> tables = [Table("user", 9, 8), Table("item", 9, 4), Table("shop", 9, 8)]
        >>> [group.space.features for group in group_tables(tables, SGD(lr=0.1))]
        [('user', 'shop'), ('item',)]
    """
    check_tables(tables)
    optimizers = optimizers_of(tables, optimizer)
    alike: dict[object, list[Table]] = {}
    for table in tables:
        chosen = optimizers[table.name]
        if (
            table.dtype != "float32"
            and chosen.narrow_kernel is None
            and not isinstance(chosen, Frozen)
        ):
            raise ConfigError(
                f"table {table.name!r} of {table.dtype} with {type(chosen).__name__}, which has no"
                " narrow_kernel",
                "a table of float32, or another optimizer",
            )
        kind = table.dim, table.pooling == "none", table.dtype, chosen
        alike.setdefault(kind, []).append(table)
    readers = [table for table in tables for _ in table.features]
    width, first = side_by_side(
        {place: table.dim for place, table in enumerate(readers) if table.pooling != "none"}
    )
    groups = []
    for members in alike.values():
        names = {table.name for table in members}
        places = tuple(place for place, table in enumerate(readers) if table.name in names)
        space = RowSpace(members, indices)
        columns = None
        if space.is_pooled:
            columns = Columns(
                width, space.dim, np.array([first[place] for place in places], np.int64)
            )
        groups.append(TableGroup(space, optimizers[members[0].name], places, columns))
    return tuple(groups)


def names_of_readers(tables: Sequence[Table]) -> tuple[str, ...]:
    """The readers' names: ``feature``, or ``feature@table`` of one with several tables.

    Example:
        >>> names_of_readers([Table("wide", 9, 1, features=("user", "item")), Table("user", 9, 8)])
        ('user@wide', 'item', 'user@user')
    """
    readers = [(feature, table.name) for table in tables for feature in table.features]
    features = [feature for feature, _ in readers]
    return tuple(
        name if features.count(name) == 1 else f"{name}@{table}" for name, table in readers
    )
