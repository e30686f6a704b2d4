"""Tables in torch's ``state_dict``, under TorchRec's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pibroch.embedding import MemoryShard, PieceView, RowArray, Shard, Table
from pibroch.embedding.narrow_rows import tensor_of
from pibroch.embedding.row_set import RowSet, as_slice
from pibroch.errors import ConfigError
from pibroch.kernels.arrays import Ints
from pibroch.state.parts import WEIGHT
from pibroch.state.trained import TablesOfRanks


def name_of(embeddings: TablesOfRanks, table: Table, field: str = WEIGHT) -> str:
    """TorchRec's name of a table's weights; others of its fields are named alike."""
    return f"{embeddings.kind_in_state}.{table.name}.{field}"


def whole_tables(
    tables: Sequence[Table], shards: Sequence[Shard], prefix: str
) -> dict[str, Tensor]:
    """The weights of all tables by name, views into the records, of the tables' types.

    Args:
        tables: all.
        shards: of this process, with nothing under way.
        prefix: of the names.

    Raises:
        ConfigError: where these do not hold whole tables.
    """
    return {f"{prefix}{table.name}.weight": tensor_of(_whole(table, shards)) for table in tables}


def _whole(table: Table, shards: Sequence[Shard]) -> RowArray:
    """A table's weights, ``[num_rows, dim]``, if they are all here."""
    for shard in shards:
        for piece in shard.pieces if isinstance(shard, MemoryShard) else ():
            is_whole = (len(piece.rows), len(piece.columns)) == (table.num_rows, table.dim)
            if piece.table.name == table.name and is_whole and isinstance(shard, MemoryShard):
                return shard.weights(table.name)
    raise ConfigError(
        f"state of table {table.name!r}, which lies on several ranks",
        "all of it in this process",
        "gather it by full_state_dict(), or use pibroch.save, which knows of no ranks",
    )


def load_tables(
    tables: Sequence[Table], views: Sequence[PieceView], prefix: str, state: Mapping[str, Any]
) -> tuple[list[str], list[str], list[str]]:
    """Copy whole tables of a state into the pieces of them that are here.

    Returns:
        Names of what is missing, of what belongs to no table, and of what does not fit; tables that
        fit are loaded all the same.
    """
    names = {f"{prefix}{table.name}.weight": table for table in tables}
    missing = [name for name in names if name not in state]
    errors = []
    for name, table in names.items():
        if name not in state:
            continue
        if tuple(state[name].shape) != (table.num_rows, table.dim):
            errors.append(
                f"{name}: got {list(state[name].shape)}, need {[table.num_rows, table.dim]}"
            )
            continue
        weights = state[name].detach().float().cpu().numpy()
        for view in views:
            if view.piece.table.name == table.name:
                view.weights[:] = weights[_chosen(view.piece.rows), as_slice(view.piece.columns)]
    return missing, [key for key in state if key.startswith(prefix) and key not in names], errors


def _chosen(rows: RowSet) -> slice | Ints:
    return as_slice(rows) if isinstance(rows, range) else rows.ids
