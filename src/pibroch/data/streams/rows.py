"""Parquet files, which are read once they are whole."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pibroch.data.parquet import ParquetSource
from pibroch.data.schema import Schema
from pibroch.data.sources import Place, TextPiece
from pibroch.data.streams.base import Range, Records, changed, check_same
from pibroch.kernels.text import RECORD_ITEMS, find_fields

_MAGIC = b"PAR1"
_PIECE_BYTES = 1 << 22
"""As :meth:`ParquetSource.pieces` counts it: 16,384 rows at once."""


def is_whole_parquet(path: Path) -> bool:
    """Whether a file ends as a Parquet file does; one that is being written does not yet."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size < 3 * len(_MAGIC):
            return False
        file.seek(-len(_MAGIC), os.SEEK_END)
        return file.read() == _MAGIC


class RowsFile:
    """One Parquet file.

    Args:
        path: of the file, which is whole.
        name: for ranges.
        partition: likewise.
        schema: of the records.

    Raises:
        DataError: as :class:`ParquetSource`.
    """

    leftover: None = None

    def __init__(self, path: Path, name: str, partition: str, schema: Schema) -> None:
        self.path = path
        self._name = name
        self._partition = partition
        stat = path.stat()
        self.identity = (stat.st_dev, stat.st_ino)
        self.raw_bytes = stat.st_size
        self._source = ParquetSource(path, schema, may_be_empty=True)
        self._begin(0)

    def _begin(self, row: int) -> None:
        self._row = row
        self._pieces: Iterator[TextPiece] = self._source.pieces(Place(row, row), _PIECE_BYTES)
        self._text = b""
        self._ends: list[int] = []  # of the records in the text
        self._start = 0

    def next(self, most_records: int) -> Records | None:
        """See :class:`Partition`."""
        if not self._ends:
            piece = next(self._pieces, None)
            if piece is None:
                return None
            self._text = piece.text
            self._ends = ends_of(piece.text, self._source.layout.separator)
            self._start = 0
        count = min(most_records, len(self._ends))
        end = self._ends[count - 1]
        text = self._text[self._start : end]
        where = (self._partition, self._name, self._row, self._row + count, self._row)
        self._row += count
        self._start = end
        self._ends = self._ends[count:]
        range = Range(*where, count, zlib.crc32(text))
        return Records(range, text, self._source.columns, self._source.layout)

    def again(self, range: Range) -> Records:
        """See :class:`Partition`."""
        if range.begin != self._row:
            self._begin(range.begin)
        parts: list[Records] = []
        left = range.records
        while left and (part := self.next(left)) is not None:
            parts.append(part)
            left -= part.range.records
        if left:
            raise changed(range, f"of which {range.records - left:,} rows are there now")
        text = b"".join(part.text for part in parts)
        check_same(range, zlib.crc32(text))
        return Records(range, text, self._source.columns, self._source.layout)

    def go_on_after(self, range: Range) -> None:
        """See :class:`Partition`."""
        self.again(range)

    def close(self) -> None:
        """Let go of the file."""
        self._pieces = iter(())


def ends_of(text: bytes, separator: str) -> list[int]:
    """Where each record of a text ends, behind its newline; records may have several lines."""
    if b'"' not in text:
        ends = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n")) + 1
        return list(map(int, ends))
    buffer = np.frombuffer(text, np.uint8).copy()
    records = np.empty((text.count(b"\n") + 1, RECORD_ITEMS), np.int64)
    bounds = np.empty((len(records), 0, 2), np.int64)
    nothing = np.empty(0, np.int64)
    count = find_fields(buffer, ord(separator), True, nothing, bounds, records)
    return list(map(int, records[:count, 1] + 1))
