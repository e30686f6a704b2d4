"""Parquet files, which are read once they are whole.

Columns of whole numbers stay numbers: of ids, counts and times nothing becomes text but the few
values that a message shows. The others become delimited text, as in preparation.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl

from pibroch.data.parquet import ParquetSource, text_of_rows
from pibroch.data.parse import NO_INTEGERS, Integers, may_be_integers
from pibroch.data.schema import Schema
from pibroch.data.streams.base import Range, Records, changed, check_same

_MAGIC = b"PAR1"
_ROWS = 32_768
"""At once; a row group of more is decoded again for each."""
_NO_TEXT = pl.lit("0").alias("")
"""So that a record whose last text is missing is no blank line."""


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
        self._source = ParquetSource(path, schema)
        self._integers = tuple(
            column for column in self._source.integers if may_be_integers(schema, column)
        )
        texts = [column for column in self._source.columns if column not in self._integers]
        is_whole = set(schema.log_columns()) <= set(self._source.columns)  # else nobody parses it
        self._texts: list[str | pl.Expr] = [*texts, _NO_TEXT] if texts and is_whole else []
        self._columns = (*texts, "") if texts else ()
        self._begin(0)

    def _begin(self, row: int) -> None:
        self._row = row
        self._frames: Iterator[pl.DataFrame] = self._source.frames(row, _ROWS)
        self._block = _Block(pl.DataFrame(), NO_INTEGERS)
        self._whole: Records | None = None

    def next(self, most_records: int) -> Records | None:
        """See :class:`Partition`."""
        first = self._row
        block = self._take(most_records)
        return None if block is None else replace(self._records(first, block), whole=self._whole)

    def _take(self, most_rows: int) -> _Block | None:
        """Rows that come next, at least one; ``None`` behind the last."""
        if self._block.rows.is_empty():
            frame = next(self._frames, None)
            if frame is None:
                return None
            self._block = _Block(frame, _integers_of(frame.select(self._integers)))
            self._whole = None if self._texts else self._records_of(self._row, self._block, b"", 0)
        block = self._block.between(0, most_rows)
        self._block = self._block.between(most_rows, None)
        self._row += block.rows.height
        return block

    def _records(self, first: int, block: _Block) -> Records:
        integers = block.integers
        text = text_of_rows(block.rows.select(self._texts)) if self._texts else b""
        crc = 0
        for column in integers.values.T:
            crc = zlib.crc32(np.ascontiguousarray(column).data, crc)
        if integers.is_missing.any():
            crc = zlib.crc32(np.ascontiguousarray(integers.is_missing).data, crc)
        return self._records_of(first, block, text, zlib.crc32(text, crc))

    def _records_of(self, first: int, block: _Block, text: bytes, crc: int) -> Records:
        where = (self._partition, self._name, first, first + block.rows.height, first)
        return Records(
            Range(*where, block.rows.height, crc),
            text,
            self._columns,
            self._source.layout,
            integers=block.integers,
            rows=block.rows,
        )

    def again(self, range: Range) -> Records:
        """See :class:`Partition`."""
        if range.begin != self._row:
            self._begin(range.begin)
        parts: list[_Block] = []
        left = range.records
        while left and (part := self._take(left)) is not None:
            parts.append(part)
            left -= part.rows.height
        if left:
            raise changed(range, f"of which {range.records - left:,} rows are there now")
        records = self._records(range.begin, _joined(parts))
        check_same(range, records.range.crc)
        return records

    def go_on_after(self, range: Range) -> None:
        """See :class:`Partition`."""
        self.again(range)

    def close(self) -> None:
        """Let go of the file."""
        self._frames = iter(())


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows, and their integers."""

    rows: pl.DataFrame
    integers: Integers

    def between(self, first: int, end: int | None) -> _Block:
        integers = self.integers
        values = integers.values[first:end]
        is_missing = integers.is_missing[first:end]
        length = None if end is None else end - first
        return _Block(
            self.rows.slice(first, length), replace(integers, values=values, is_missing=is_missing)
        )


def _joined(blocks: list[_Block]) -> _Block:
    if len(blocks) == 1:
        return blocks[0]
    values = np.concatenate([block.integers.values for block in blocks])
    is_missing = np.concatenate([block.integers.is_missing for block in blocks])
    integers = Integers(blocks[0].integers.columns, values, is_missing)
    return _Block(pl.concat([block.rows for block in blocks]), integers)


def _integers_of(frame: pl.DataFrame) -> Integers:
    """The integers of a frame, in memory by columns."""
    columns = tuple(frame.columns)
    if not columns:
        return Integers((), np.empty((frame.height, 0), np.int64), np.empty((0, 0), np.bool_))
    is_missing = np.zeros(frame.shape, np.bool_, order="F")
    if any(frame.null_count().row(0)):
        is_missing = frame.select(pl.all().is_null()).to_numpy()
        frame = frame.fill_null(0)
    values = frame.to_numpy().astype(np.int64, copy=False)
    return Integers(columns, np.asfortranarray(values), np.asfortranarray(is_missing))
