"""Tables for ``torch.distributed.checkpoint`` (DCP).

Each rank has a block of consecutive rows, so that DCP itself reshards them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pibroch.collectives.agreement import agreed
from pibroch.embedding import Table
from pibroch.embedding.row_index import check_state, load_state, state_of
from pibroch.errors import CheckpointError, ConfigError
from pibroch.kernels.arrays import Array, Records
from pibroch.state.parts import WEIGHT
from pibroch.state.row_blocks import RowBlocks, even_blocks
from pibroch.state.state_dict import name_of
from pibroch.state.tables import saved_tables
from pibroch.state.trained import TablesOfRanks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

STEP = "step"
ROW_INDEX = "row_index."
"""What stands before a table's name in the names of its row index's state."""


class EmbeddingState:
    """What ``dcp.save`` and ``dcp.load`` take as a ``Stateful``; every rank passes one.

    Between ranks weights and every field of optimizer state are DTensors, ``Shard(0)`` over all
    ranks; in one process plain tensors. ``step`` and the tables' learning rates are tensors
    too, so that DCP pickles nothing of this.

    Args:
        embeddings: between all ranks of torch.distributed's group.

    Raises:
        ConfigError: for tables of some of the ranks, which DCP does not know.
    """

    def __init__(self, embeddings: TablesOfRanks) -> None:
        self._embeddings = embeddings
        if not embeddings.ranks.are_all:
            raise ConfigError(
                "tables of a group of ranks, for torch.distributed.checkpoint",
                "tables of all ranks",
                "use pibroch.save",
            )
        self._saved = saved_tables(embeddings.tables, embeddings.optimizers)

    def state_dict(self) -> dict[str, Tensor]:
        """All tables; a copy of this rank's share of their rows. Every rank calls it."""
        embeddings = self._embeddings
        blocks = RowBlocks(embeddings.control, embeddings.pieces())
        mesh = self._mesh()
        state: dict[str, Tensor] = {}
        for table in embeddings.tables:
            saved = self._saved[table.name]
            cut = even_blocks(table.num_rows, embeddings.ranks.world_size)
            for field, numbers in blocks.collect(table, saved, [WEIGHT, *saved.state], cut).items():
                state[name_of(self._embeddings, table, field)] = _distributed(
                    table.num_rows, numbers, mesh
                )
        rates = {
            table: group["lr"]
            for group in embeddings.fused_optimizer.param_groups
            for table in group["tables"]
        }
        state |= {
            f"learning_rates.{table}": torch.tensor(float(rate), dtype=torch.float64)
            for table, rate in rates.items()
        }
        state |= {
            f"{ROW_INDEX}{name}": torch.from_numpy(array.copy())
            for name, array in state_of(embeddings.row_indices).items()
        }
        return state | {STEP: torch.tensor(embeddings.step)}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Fill tables, step and learning rates from a state that DCP has filled.

        Every rank calls it.

        Raises:
            CheckpointError: (on all ranks) when something is missing.
        """
        embeddings = self._embeddings
        channel = self._embeddings.control
        agreed(channel, lambda: self._check(state_dict))
        with embeddings.rewriting() as views:
            load_state(embeddings.row_indices, _of_indices(state_dict))
            blocks = RowBlocks(channel, views)
            for table in embeddings.tables:
                cut = even_blocks(table.num_rows, embeddings.ranks.world_size)
                numbers = {
                    field: _local(state_dict[name_of(self._embeddings, table, field)])
                    for field in self._fields(table)
                }
                blocks.spread(table, self._saved[table.name], numbers, cut)
            for view in views:
                view.mark(slice(None))
        embeddings.step = int(state_dict[STEP])
        for group in embeddings.fused_optimizer.param_groups:
            group["lr"] = float(state_dict[f"learning_rates.{group['tables'][0]}"])

    def _fields(self, table: Table) -> list[str]:
        return [WEIGHT, *self._saved[table.name].state]

    def _check(self, state: Mapping[str, Tensor]) -> None:
        names = [
            name_of(self._embeddings, table, field)
            for table in self._embeddings.tables
            for field in self._fields(table)
        ]
        missing = [name for name in [*names, STEP] if name not in state]
        if missing:
            raise CheckpointError(
                f"no {missing[0]!r} in the state",
                "all tables with their optimizers' state",
                "load what state_dict() gave",
            )
        check_state(self._embeddings.row_indices, _of_indices(state))

    def _mesh(self) -> DeviceMesh | None:
        if self._embeddings.ranks.world_size == 1:
            return None
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh("cpu", (self._embeddings.ranks.world_size,))


def _distributed(num_rows: int, block: Records, mesh: DeviceMesh | None) -> Tensor:
    """A block of rows as this rank's part of a tensor ``[num_rows, floats]``."""
    local = torch.from_numpy(block)
    if mesh is None:
        return local
    from torch.distributed.tensor import DTensor, Shard

    width = local.shape[1]
    return DTensor.from_local(
        local,
        mesh,
        [Shard(0)],
        run_check=False,
        shape=torch.Size((num_rows, width)),
        stride=(width, 1),
    )


def _of_indices(state: Mapping[str, Tensor]) -> dict[str, Array]:
    return {
        name.removeprefix(ROW_INDEX): tensor.numpy()
        for name, tensor in state.items()
        if name.startswith(ROW_INDEX)
    }


def _local(tensor: Tensor) -> Records:
    here: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return np.asarray(here.detach().cpu().float().numpy())
