"""Tables on disk: one safetensors file a table, holding ``weight`` and each field of optimizer state.

A file knows its table and nothing of row spaces, shards or ranks, so what any of them saved any other loads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from pibroch.embedding.storage import FileDigest, read_into, write_tensors
from pibroch.embedding.table import Table
from pibroch.errors import CheckpointError

FOLDER = "tables"


class RowStore(Protocol):
    """What holds the rows of tables, such as a memory shard."""

    def weights(self, table: str) -> NDArray[np.float32]:
        """View of a table's weights, ``[rows, dim]``."""

    def state(self, table: str) -> dict[str, NDArray[np.float32]]:
        """Views of a table's optimizer state by field, each ``[rows, floats]``."""


@dataclass(frozen=True, slots=True)
class SavedTable:
    """The shape of a table in a checkpoint; ``state`` maps a field of optimizer state to its floats in a row."""

    num_rows: int
    dim: int
    state: Mapping[str, int]

    def __str__(self) -> str:
        fields = ", ".join(f"{name}[{width}]" for name, width in self.state.items()) or "none"
        return f"{self.num_rows} rows x {self.dim} with optimizer state {fields}"


def table_file(name: str) -> str:
    """Path of a table's file inside a checkpoint."""
    return f"{FOLDER}/{quote(name, safe=' ')}.safetensors"


def saved_shape(name: str, rows: RowStore) -> SavedTable:
    """The shape under which a table is saved."""
    num_rows, dim = rows.weights(name).shape
    return SavedTable(num_rows, dim, {field: view.shape[1] for field, view in rows.state(name).items()})


def save_tables(folder: Path, tables: Sequence[Table], rows: RowStore) -> dict[str, FileDigest]:
    """Write a file for each table into the checkpoint ``folder``; returns their digests by path inside it.

    Raises:
        TrainingError: when a number is NaN or infinite.
        OSError: when the disk refuses.
    """
    (folder / FOLDER).mkdir(exist_ok=True)
    digests = {}
    for table in tables:
        file = table_file(table.name)
        digests[file] = write_tensors(folder / file, _tensors(table.name, rows))
    return digests


def load_tables(folder: Path, tables: Sequence[Table], rows: RowStore) -> None:
    """Fill ``rows`` from a checkpoint whose files were verified: weights, and what state ``rows`` has room for.

    Raises:
        CheckpointError: when a table has another shape.
    """
    for table in tables:
        read_into(folder / table_file(table.name), _tensors(table.name, rows))


def check_tables_match(
    saved: Mapping[str, SavedTable], wanted: Mapping[str, SavedTable], *, same_state: bool = True
) -> None:
    """Compare the tables of a checkpoint with those of the run that wants to load it.

    Args:
        saved: by name.
        wanted: by name.
        same_state: whether all optimizer state must be the same; otherwise what is wanted must be there.

    Raises:
        CheckpointError: names the first table that differs, with both sizes.
    """
    do = "load a checkpoint trained on this dataset, or prepare the data with the schema that it was trained on"
    for name in [*wanted, *saved]:
        if name not in saved or name not in wanted:
            got, need = (
                (f"no table {name!r}", f"{wanted[name]}") if name in wanted else (f"table {name!r}", "no such table")
            )
            raise CheckpointError(f"{got} in the checkpoint", need, do)
        have, need_table = saved[name], wanted[name]
        if (have.num_rows, have.dim) != (need_table.num_rows, need_table.dim):
            raise CheckpointError(f"table {name!r} with {have} in the checkpoint", f"{need_table}, as this run has", do)
        found = have.state.items() if same_state else have.state.items() & need_table.state.items()
        if set(found) != set(need_table.state.items()):
            raise CheckpointError(
                f"table {name!r} with {have} in the checkpoint",
                f"{need_table}",
                "resume with the optimizer it was saved with",
            )


def _tensors(name: str, rows: RowStore) -> dict[str, NDArray[Any]]:
    return {"weight": rows.weights(name), **rows.state(name)}
