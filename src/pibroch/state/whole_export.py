"""An export and what changed since become one export again, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pibroch.state.export_format import EXPORT, ROWS, ExportDtype, ExportManifest, RowShard
from pibroch.state.exported_rows import RowVersions, check_written, written_as
from pibroch.state.files import FileDigest, verify_file
from pibroch.state.tensor_file import Stream, TensorFile, rows_that_fit, write_tensors


@dataclass(frozen=True, slots=True)
class Layers:
    """Rows of all tables as an export has them, under versions of which later ones count.

    Attributes:
        dim: weights in a row.
        dtype: of the rows.
        versions: the later ones behind the earlier ones.
        base: the export and its folder; without it, versions have all rows.
    """

    dim: int
    dtype: ExportDtype
    versions: Sequence[RowVersions]
    base: tuple[Path, ExportManifest] | None = None

    def write(self, folder: Path, shard: RowShard) -> FileDigest:
        """Write a file of rows into the folder of an export.

        Raises:
            DamagedCheckpointError: for files of the base that changed since they were written.
            OSError: when the disk refuses.
        """
        kind, width = written_as(self.dim, self.dtype)
        stream = Stream(np.dtype(kind), (shard.num_rows, width), self._chunks(shard))
        return write_tensors(folder / shard.file, {ROWS: stream})

    def _chunks(self, shard: RowShard) -> Iterator[NDArray[np.generic]]:
        kind, width = written_as(self.dim, self.dtype)
        below = self._base_of(shard)
        step = rows_that_fit(np.dtype(kind).itemsize * width)
        end = shard.first_row + shard.num_rows
        for start in range(shard.first_row, end, step):
            stop = min(start + step, end)
            out = np.empty((stop - start, width), kind)
            num_there = 0
            for first, rows in below:
                here = rows[max(0, start - first) : max(0, stop - first)]
                place = max(0, first - start)
                out[place : place + len(here)] = here
                num_there += len(here)
            for each in self.versions:
                begin, after = np.searchsorted(each.row_ids, [start, stop])
                out[each.row_ids[begin:after] - start] = each.rows[begin:after]
                num_there += 0 if below else after - begin
            assert num_there == len(out), "rows that nobody has"
            yield out

    def _base_of(self, shard: RowShard) -> list[tuple[int, NDArray[np.generic]]]:
        """The base's rows in a file, verified, behind the first of each of its files."""
        if self.base is None:
            return []
        folder, manifest = self.base
        found = []
        end = shard.first_row + shard.num_rows
        for each in manifest.shards:
            if each.first_row < end and shard.first_row < each.first_row + each.num_rows:
                verify_file(folder, each.file, manifest.files[each.file], EXPORT)
                with TensorFile(folder, each.file, EXPORT) as file:
                    rows = file.mapped(ROWS)
                check_written(folder / each.file, rows, each.num_rows, self.dim, self.dtype)
                found.append((each.first_row, rows))
        return found
