"""Whole tables as plain tensors, wherever their rows lie: gathered for other tools, and filled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from pibroch.collectives.agreement import agreed
from pibroch.embedding import Table
from pibroch.errors import CheckpointError
from pibroch.kernels.arrays import Records
from pibroch.state.parts import WEIGHT
from pibroch.state.row_blocks import RowBlocks
from pibroch.state.state_dict import name_of
from pibroch.state.tables import saved_tables
from pibroch.state.trained import TablesOfRanks

_DO = "pass what full_state_dict() of embeddings with the same tables gave"


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
                    field: _array(state[name_of(embeddings, table, field)]) for field in fields
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


def _array(tensor: Tensor) -> Records:
    return np.asarray(tensor.detach().cpu().float().numpy())


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
