"""Tables in torch's ``state_dict``, under TorchRec's names.

Whole ones where they lie, or gathered from wherever their rows lie, and filled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pibroch.collectives.agreement import agreed
from pibroch.embedding import MemoryShard, PieceView, RowArray, Shard, Table
from pibroch.embedding.narrow_rows import tensor_of
from pibroch.embedding.row_set import RowSet, as_slice
from pibroch.errors import CheckpointError, ConfigError
from pibroch.kernels.arrays import Ints, Records
from pibroch.state.parts import WEIGHT
from pibroch.state.row_blocks import RowBlocks
from pibroch.state.tables import saved_tables
from pibroch.state.trained import TablesOfRanks

_DO = "pass what full_state_dict() of embeddings with the same tables gave"


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


def gather_tables(
    embeddings: TablesOfRanks, tables: Sequence[Table], *, on_all_ranks: bool, row_state: bool
) -> dict[str, Tensor]:
    """See :meth:`pibroch.exchange.Embeddings.full_state_dict`."""
    channel = embeddings.control
    state = dict[str, Tensor]()
    blocks = RowBlocks(channel, embeddings.pieces())
    size = channel.ranks.world_size
    for table in tables:
        saved = saved_tables([table], embeddings.optimizers[table.name])[table.name]
        fields = [WEIGHT, *(saved.state if row_state else ())]
        all_rows = range(table.num_rows)
        no_rows = range(0)
        blocks_of_ranks = [
            all_rows if on_all_ranks or rank == 0 else no_rows for rank in range(size)
        ]
        numbers = blocks.collect(table, saved, fields, blocks_of_ranks)
        if blocks_of_ranks[channel.ranks.rank]:
            state |= {
                name_of(embeddings, table, field): torch.from_numpy(array)
                for field, array in numbers.items()
            }
    return state


def fill_tables(embeddings: TablesOfRanks, state: Mapping[str, Tensor], strict: bool) -> None:
    """See :meth:`pibroch.exchange.Embeddings.load_full_state_dict`."""
    channel = embeddings.control
    is_first = embeddings.control.ranks.rank == 0
    saved = saved_tables(embeddings.tables, embeddings.optimizers)
    agreed(channel, lambda: _check(embeddings, state, strict) if is_first else None)
    given: list[list[str]] = channel.gather([*state] if is_first else [])
    with embeddings.rewriting() as views:
        blocks = RowBlocks(channel, views)
        for table in (each for each in embeddings.tables if name_of(embeddings, each) in given[0]):
            fields = [
                field
                for field in (WEIGHT, *saved[table.name].state)
                if name_of(embeddings, table, field) in given[0]
            ]
            numbers: dict[str, Records] = {field: np.empty((0, 0), np.float32) for field in fields}
            if is_first:
                numbers = {
                    field: state[name_of(embeddings, table, field)].detach().cpu().float().numpy()
                    for field in fields
                }
            held = [
                range(table.num_rows) if rank == 0 else range(0)
                for rank in range(channel.ranks.world_size)
            ]
            blocks.spread(table, saved[table.name], numbers, held)
        for view in (each for each in views if name_of(embeddings, each.piece.table) in given[0]):
            if (
                "average" in view.state
                and name_of(embeddings, view.piece.table, "average") not in given[0]
            ):
                view.state["average"][:] = view.weights
                view.state["averaged_at"][:] = embeddings.step
            view.mark(slice(None))


def _check(embeddings: TablesOfRanks, state: Mapping[str, Tensor], strict: bool) -> None:
    saved = saved_tables(embeddings.tables, embeddings.optimizers)
    shapes: dict[str, list[int]] = {}
    for table in embeddings.tables:
        widths = {WEIGHT: table.dim, **saved[table.name].state}
        shapes |= {
            name_of(embeddings, table, field): [table.num_rows, width]
            for field, width in widths.items()
        }
        if name_of(embeddings, table) not in state and (
            strict or any(name_of(embeddings, table, field) in state for field in widths)
        ):
            raise CheckpointError(
                f"no {name_of(embeddings, table)!r} in the state", "the weights of all tables", _DO
            )
    for name, tensor in state.items():
        if name not in shapes:
            raise CheckpointError(f"{name!r} in the state", f"one of {', '.join(shapes)}", _DO)
        if list(tensor.shape) != shapes[name]:
            raise CheckpointError(f"{name!r} of shape {list(tensor.shape)}", f"{shapes[name]}", _DO)
