"""What exports and deltas have in common when they are written, whoever writes them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

from pibroch.data.encode import index_of
from pibroch.data.vocabularies import Vocabularies
from pibroch.state.export_format import WRITE_AGAIN, ExportDtype, ExportedTable, RowShard
from pibroch.state.exported_rows import row_bytes
from pibroch.state.files import FileDigest
from pibroch.state.tensor_file import write_tensors
from pibroch.storage import new_folder

SHARD_BYTES = 4 << 30
"""Of rows in a file, about."""
Written = TypeVar("Written")


def tables_of(num_rows: Mapping[str, int]) -> tuple[ExportedTable, ...]:
    """Where tables' rows lie among all, by name.

    >>> [table.first_row for table in tables_of({"a": 3, "b": 2})]
    [0, 3]
    """
    firsts = accumulate(num_rows.values(), initial=0)
    return tuple(
        ExportedTable(name=name, first_row=first, num_rows=count)
        for (name, count), first in zip(num_rows.items(), firsts, strict=False)
    )


def shards_of(
    tables: Sequence[ExportedTable], dim: int, dtype: ExportDtype, shard_bytes: int = SHARD_BYTES
) -> tuple[RowShard, ...]:
    """Files of at most about so many bytes for the rows of all tables."""
    num_rows = tables[-1].first_row + tables[-1].num_rows
    most = max(1, shard_bytes // row_bytes(dim, dtype))
    starts = range(0, num_rows, most)
    return tuple(
        RowShard(
            file=f"tables/rows-{number:05}-of-{len(starts):05}.safetensors",
            first_row=start,
            num_rows=min(most, num_rows - start),
        )
        for number, start in enumerate(starts)
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
