"""Which row an id has, in exports and deltas of tables of raw ids.

``ids.safetensors`` has two tensors for each such table: its ids and the row of each one within the
table. In a delta these are the ids that changed, and the row is -1 where an id has none any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from pibroch.embedding.row_index import LearningIndex
from pibroch.kernels.arrays import Ints, distinct
from pibroch.state.export_format import EXPORT, IDS, ExportedTable
from pibroch.state.files import FileDigest
from pibroch.state.tensor_file import Stream, TensorFile, write_tensors


class TableIds(NamedTuple):
    """Ids of a table, rising, and the row of each, int64 ``[U]`` both.

    Both may lie in a file. Among changes, the row is -1 where an id has none any more.
    """

    ids: Ints
    rows: Ints

    @classmethod
    def of(cls, rows: Ints, ids: Ints) -> Self:
        """Of rows and the id of each, in any order."""
        order = ids.argsort()
        return cls(ids[order], rows[order])

    @classmethod
    def in_index(cls, index: LearningIndex, min_count: int = 1) -> Self:
        """The ids that have rows, and were seen so often."""
        rows, ids = index.entries()
        is_kept = index.counts_of(rows) >= min_count
        return cls.of(rows[is_kept], ids[is_kept])

    def changes_since(self, before: Sequence[TableIds]) -> TableIds:
        """What makes these ids of those, which may lie in layers as :func:`rows_of` takes them.

        >>> before = TableIds(np.array([3, 5]), np.array([1, 0]))
        >>> TableIds(np.array([3, 9]), np.array([1, 0])).changes_since([before])
        TableIds(ids=array([5, 9]), rows=array([-1,  0]))
        """
        is_new = self.rows != rows_of(self.ids, before)
        known = distinct(np.concatenate([layer.ids for layer in before]))
        is_gone = (rows_of(known, before) >= 0) & (rows_of(known, [self]) < 0)
        gone = known[is_gone]
        return TableIds.of(
            np.concatenate([self.rows[is_new], np.full(len(gone), -1)]),
            np.concatenate([self.ids[is_new], gone]),
        )

    def with_changes(self, changes: TableIds) -> TableIds:
        """Changes, and later changes, as one."""
        ids, places = np.unique(np.concatenate([changes.ids, self.ids]), return_index=True)
        return TableIds(ids, np.concatenate([changes.rows, self.rows])[places])

    def used(self, num_rows: int, has_unknown_row: bool) -> NDArray[np.bool_]:
        """Which rows of a table are read for some id, ``[num_rows]``."""
        is_used = np.zeros(num_rows, np.bool_)
        is_used[self.rows] = True
        is_used[:has_unknown_row] = True
        return is_used


def rows_of(ids: Ints, layers: Sequence[TableIds]) -> Ints:
    """The row of each id, -1 for none, int64 ``[V]`` both; by binary search.

    Args:
        ids: in any order.
        layers: of which later ones count.
    """
    order = ids.argsort()  # a search then reads what the one before it has read
    wanted = ids[order]
    found = np.full(len(ids), -1)
    for known in layers:
        if len(known.ids):
            places = np.minimum(known.ids.searchsorted(wanted), len(known.ids) - 1)
            is_there = known.ids[places] == wanted
            found[is_there] = known.rows[places[is_there]]
    rows = np.empty_like(found)
    rows[order] = found
    return rows


def write_ids(path: Path, tables: Mapping[str, TableIds]) -> FileDigest:
    """Write the file of the ids of some tables."""
    return write_tensors(
        path,
        {
            f"{name}.{what}": Stream.of(array)
            for name, table in tables.items()
            for what, array in table._asdict().items()
        },
    )


def read_ids(
    folder: Path, tables: Sequence[ExportedTable], is_delta: bool = False
) -> dict[str, TableIds]:
    """The ids of those tables of an export that have ids of their own, mapped.

    Args:
        folder: of the export, or of a delta.
        tables: of the export.
        is_delta: whether these are changes.

    Raises:
        DamagedCheckpointError: when the file does not fit the tables.
    """
    own = [table for table in tables if table.has_ids]
    if not own:
        return {}
    least = -1 if is_delta else 0
    found = {}
    with TensorFile(folder, IDS, EXPORT) as file:
        for table in own:
            ids, rows = (file.mapped(f"{table.name}.{what}") for what in TableIds._fields)
            fits = (
                ids.dtype == rows.dtype == np.int64
                and ids.ndim == 1
                and ids.shape == rows.shape
                and bool((ids[1:] > ids[:-1]).all())
                and (not len(rows) or least <= rows.min() <= rows.max() < table.num_rows)
            )
            if not fits:
                raise EXPORT(
                    f"{folder / IDS} with other ids of table {table.name!r}",
                    f"rising ones, int64, each with a row below {table.num_rows}",
                )
            found[table.name] = TableIds(ids, rows)
    return found
