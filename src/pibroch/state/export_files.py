"""What exports and deltas have in common when they are written, whoever writes them.

And how an export and what changed since become one export again, in bounded memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pibroch.data.encode import index_of
from pibroch.data.vocabularies import Vocabularies
from pibroch.state.export_format import (
    EXPORT,
    ROWS,
    WRITE_AGAIN,
    ExportDtype,
    ExportedTable,
    ExportManifest,
    RowShard,
)
from pibroch.state.exported_ids import TableIds
from pibroch.state.exported_rows import RowVersions, check_written, row_bytes, written_as
from pibroch.state.files import FileDigest, verify_file
from pibroch.state.tensor_file import Stream, TensorFile, rows_that_fit, write_tensors
from pibroch.storage import new_folder

SHARD_BYTES = 4 << 30
"""Of rows in a file, about."""
Written = TypeVar("Written")


def tables_of(
    num_rows: Mapping[str, int],
    with_ids: Collection[str] = (),
    with_unknown_row: Collection[str] = (),
) -> tuple[ExportedTable, ...]:
    """Where tables' rows lie among all, by name; some of them have raw ids, some a row for others.

    >>> [table.first_row for table in tables_of({"a": 3, "b": 2})]
    [0, 3]
    """
    firsts = accumulate(num_rows.values(), initial=0)
    return tuple(
        ExportedTable(
            name=name,
            first_row=first,
            num_rows=count,
            has_ids=name in with_ids,
            has_unknown_row=name in with_unknown_row,
        )
        for (name, count), first in zip(num_rows.items(), firsts, strict=False)
    )


def shards_of(
    tables: Sequence[ExportedTable],
    dim: int,
    dtype: ExportDtype,
    ids: Mapping[str, TableIds],
    shard_bytes: int = SHARD_BYTES,
) -> tuple[RowShard, ...]:
    """Files of at most about so many bytes for the rows of all tables.

    Of tables of raw ids, whose lowest rows are used first, up to the last row that has an id.
    """
    most = max(1, shard_bytes // row_bytes(dim, dtype))
    spans: list[range] = []
    for table in tables:
        num_rows = table.num_rows
        if table.has_ids:
            last = int(ids[table.name].rows.max(initial=-1))
            num_rows = max(last + 1, table.has_unknown_row)
        first = table.first_row
        if spans and spans[-1].stop == first:
            first = spans.pop().start
        spans += [range(first, table.first_row + num_rows)]
    pieces = [span[start : start + most] for span in spans for start in range(0, len(span), most)]
    return tuple(
        RowShard(
            file=f"tables/rows-{number:05}-of-{len(pieces):05}.safetensors",
            first_row=piece.start,
            num_rows=len(piece),
        )
        for number, piece in enumerate(pieces)
    )


def publish(out: Path, write: Callable[[Path], Written]) -> Written:
    """Write a folder under a temporary name, and give it its own when it is whole and on the disk.

    Raises:
        StorageError: when the disk refuses.
    """
    with new_folder(out, "a disk with room for the export", WRITE_AGAIN) as folder:
        return write(folder)


def content_version(
    step: int, dtype: ExportDtype, files: Mapping[str, FileDigest], base: str = ""
) -> str:
    """Of the step and all content, such as ``1125-0c3f9a51-int8``.

    The same content has the same name.
    """
    content = base + json.dumps(
        {name: asdict(digest) for name, digest in files.items()}, sort_keys=True
    )
    return f"{step}-{hashlib.sha256(content.encode()).hexdigest()[:8]}-{dtype}"


def write_vocabularies(path: Path, vocabularies: Vocabularies) -> FileDigest:
    """The dictionaries' file.

    Codes first, the wider numbers: each tensor begins at a multiple of its own width.
    """
    codes = {f"{name}.codes": codes for name, codes in vocabularies.codes.items()}
    slots = {f"{name}.slots": index_of(codes) for name, codes in vocabularies.codes.items()}
    return write_tensors(path, {**codes, **slots})


@dataclass(frozen=True, slots=True)
class Layers:
    """Rows of all tables as an export has them, under versions of which later ones count.

    Attributes:
        dim: weights in a row.
        dtype: of the rows.
        versions: the later ones behind the earlier ones.
        base: the export and its folder.

    Rows that nobody has are zeros, as those without an id are.
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
            out = np.zeros((stop - start, width), kind)
            for first, rows in below:
                here = rows[max(0, start - first) : max(0, stop - first)]
                place = max(0, first - start)
                out[place : place + len(here)] = here
            for each in self.versions:
                begin, after = np.searchsorted(each.row_ids, [start, stop])
                out[each.row_ids[begin:after] - start] = each.rows[begin:after]
            yield out

    def _base_of(self, shard: RowShard) -> list[tuple[int, NDArray[np.generic]]]:
        """The base's rows in a file, verified, behind the first of each of its files."""
        if self.base is None:
            return []
        folder, manifest = self.base
        found = []
        for each in manifest.shards:
            if each.meets(range(shard.first_row, shard.first_row + shard.num_rows)):
                verify_file(folder, each.file, manifest.files[each.file], EXPORT)
                with TensorFile(folder, each.file, EXPORT) as file:
                    rows = file.mapped(ROWS)
                check_written(folder / each.file, rows, each.num_rows, self.dim, self.dtype)
                found.append((each.first_row, rows))
        return found
