"""A checkpoint's tables for other systems: a safetensors file each, with the id of each row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import numpy as np

from pibroch.embedding.row_set import ListedRows
from pibroch.errors import ConfigError
from pibroch.overlap import refuse_overlap
from pibroch.serve.export import SavedRows
from pibroch.serve.from_checkpoint import read_verified
from pibroch.state.checkpoint_folder import find_checkpoint
from pibroch.state.export_files import publish
from pibroch.state.tensor_file import Stream, write_tensors

TENSORS = "ids", "weight"
"""Of each file: int64 ``[U]``, and float32 ``[U, D]``."""
UNKNOWN = "unknown_weight"
"""Of ids that have no row, where they share one: float32 ``[D]``."""


def export_tables(
    checkpoint: Path, out: Path, advance: Callable[[int], None] = lambda _: None
) -> int:
    """Write all rows that have an id, weights or averages of these where the run kept them.

    A row that unknown ids share is a tensor of its own.

    The files are there all or none. Memory does not grow with the tables but by 16 bytes a row.

    Args:
        checkpoint: its folder, whose files are verified first, or a run directory.
        out: a folder that does not exist yet.
        advance: told how many more rows are done.

    Returns:
        How many rows were written.

    Raises:
        CheckpointError: for a damaged checkpoint.
        ConfigError: when ``out`` exists, or where ids are neither rows nor raw.
        StorageError: when the disk refuses.
    """
    if out.exists():
        raise ConfigError(f"{out}, which exists", "a new folder", "name another, or remove it")
    folder = find_checkpoint(checkpoint)
    refuse_overlap(out, [folder], "OUT")
    manifest = read_verified(folder)
    saved = SavedRows.of(folder, manifest)

    def write(temporary: Path) -> int:
        total = 0
        for name, table in manifest.tables.items():
            rows = np.arange(table.num_rows)
            ids = rows
            if name in saved.ids:
                order = saved.ids[name].rows.argsort()
                rows = saved.ids[name].rows[order]
                ids = saved.ids[name].ids[order]
            chunks = saved.chunks(name, ListedRows.of(rows), advance)
            weights = Stream(np.dtype(np.float32), (len(rows), table.dim), chunks)
            tensors = dict(zip(TENSORS, (Stream.of(ids), weights), strict=True))
            if name in saved.with_unknown_row:
                tensors[UNKNOWN] = Stream.of(saved.weights(name, range(1))[0])
            path = temporary / f"{quote(name, safe=' ')}.safetensors"
            write_tensors(path, tensors)
            total += len(rows)
        return total

    return publish(out, write)
