"""Files of lines that may grow while they are read: CSV, TSV and JSON lines, plain or compressed.

A line is a record once its newline is there. A file's text is never held but for the records that
were asked for, and one block more.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pibroch.data.kernels.text import RECORD_ITEMS, find_fields
from pibroch.data.layout import Layout
from pibroch.data.sources import Uncompressed, split_record
from pibroch.data.streams.base import Range, Records, changed, check_same
from pibroch.errors import DataError

_BLOCK_BYTES = 1 << 16
_MOST_BUFFERED_BYTES = 8 << 20
_SHOWN_BYTES = 200
LEAST_BYTES = 4
"""Of a file whose kind can be known."""


@dataclass(frozen=True, slots=True)
class Lines:
    """Whole lines as a file has them, as delimited text.

    Attributes:
        text: delimited.
        bad: reasons by line of those that are none.
    """

    text: bytes
    bad: dict[int, str] = field(default_factory=dict)


Convert = Callable[[bytes, int], Lines]
"""From lines as they are, and the number of the first, to delimited text."""


class LinesFile:
    """One file of lines.

    Args:
        path: of the file, which has at least ``LEAST_BYTES``.
        name: for ranges.
        partition: likewise.
        layout: of the text that ``convert`` gives.
        columns: of the text; ``None`` for those that the file's first line names.
        convert: makes delimited text of lines.
        most_record_bytes: of a record; longer ones are bad.

    Raises:
        DataError: for a compressed file that is damaged.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        partition: str,
        layout: Layout,
        columns: tuple[str, ...] | None,
        convert: Convert,
        most_record_bytes: int,
    ) -> None:
        self.path = path
        self._name = name
        self._partition = partition
        self._layout = layout
        self._convert = convert
        self._most_record_bytes = most_record_bytes
        self._file = path.open("rb")
        self._columns = columns
        self._begin(0, 0)

    def _begin(self, offset: int, line: int) -> None:
        self._file.seek(0)
        self._stream = Uncompressed(self._file, self.path, _BLOCK_BYTES)
        self._stream.skip(offset)
        self._buffer = self._stream.rest()
        self._num_lines = self._buffer.count(b"\n")
        self._open_bytes = len(self._buffer) - self._buffer.rfind(b"\n") - 1  # of the last line
        self._skipped = 0  # bytes of a record that is too long, before the buffer
        self._skipped_crc = 0
        self._skipped_text = b""
        self._offset = offset
        self._line = line

    @property
    def raw_bytes(self) -> int:
        """Bytes of the file that were read, compressed ones as they are."""
        return self._file.tell()

    @property
    def identity(self) -> tuple[int, int]:
        """Of the open file, whatever its name is now: device and inode."""
        stat = os.fstat(self._file.fileno())
        return stat.st_dev, stat.st_ino

    @property
    def may_be_cut(self) -> bool:
        """Whether its leftover is a record that can be set aside, and all before it is whole."""
        return self._stream.is_complete and self._columns is not None

    @property
    def leftover(self) -> str | None:
        """What is there behind the last whole record, when nothing more comes."""
        if not self._stream.is_complete:
            return "a compressed part that does not end"
        if not self._buffer and not self._skipped:
            return None
        return "a line without its end" if self._columns is not None else "half of its header"

    def next(self, most_records: int) -> Records | None:
        """See :class:`Partition`."""
        if self._columns is None and not self._read_header():
            return None
        self._fill(most_records)
        if self._skipped or self._is_too_long():
            return self._too_long()
        if not self._num_lines:
            return None
        ends = np.flatnonzero(np.frombuffer(self._buffer, np.uint8) == ord("\n"))[:most_records]
        return self._cut(int(ends[-1]) + 1, len(ends))

    def take_leftover(self) -> Records:
        """The line without its end, which is bad."""
        reason = "a line without its end in a file that others follow"
        text = self._buffer
        size = self._skipped + len(text)
        crc = zlib.crc32(text, self._skipped_crc)
        shown = (self._skipped_text + text)[:_SHOWN_BYTES]
        self._buffer = b""
        self._open_bytes = 0
        self._skipped = 0
        return self._one_bad(size, crc, reason, shown)

    def again(self, range: Range) -> Records:
        """See :class:`Partition`."""
        if range.begin != self._offset or self._skipped:
            self._columns_at_start()
            self._begin(range.begin, range.line)
        size = range.end - range.begin
        if range.records == 1 and size > self._most_record_bytes + 1:
            return self._again_too_long(range)
        while len(self._buffer) < size and (block := self._stream.more()):
            self._add(block)
        if len(self._buffer) < size:
            raise changed(range, f"of which {len(self._buffer):,} bytes are there now")
        if range.records == 1 and not self._buffer[:size].endswith(b"\n"):
            self._buffer = self._buffer[:size]
            records = self.take_leftover()
        else:
            records = self._cut(size, range.records)
        check_same(range, records.range.crc)
        return records

    def go_on_after(self, range: Range) -> None:
        """See :class:`Partition`."""
        self.again(range)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def _columns_at_start(self) -> None:
        """Read the header, where one is to be read."""
        if self._columns is None:
            self._begin(0, 0)
            self._read_header()

    def _read_header(self) -> bool:
        self._fill(1)
        end = self._buffer.find(b"\n") + 1
        if not end:
            if self._is_too_long():
                raise DataError(
                    f"{self.path}, whose first line has more than {len(self._buffer):,} bytes",
                    "the names of the columns",
                    "look at the file, or name the columns in the schema",
                )
            return False
        header = self._buffer[:end]
        self._columns = tuple(split_record(header, self._layout.separator, self._layout.quotes))
        self._drop(end, 1)
        return True

    def _fill(self, most_records: int) -> None:
        """Read until so many lines are there, or nothing more is, or they are long."""
        while (
            self._num_lines < most_records
            and self._open_bytes <= self._most_record_bytes
            and not (self._num_lines and len(self._buffer) >= _MOST_BUFFERED_BYTES)
        ):
            block = self._stream.more()
            if not block:
                return
            self._add(block)

    def _add(self, block: bytes) -> None:
        self._buffer += block
        num_lines = block.count(b"\n")
        self._num_lines += num_lines
        behind = len(block) - block.rfind(b"\n") - 1
        self._open_bytes = behind if num_lines else self._open_bytes + len(block)

    def _is_too_long(self) -> bool:
        """Whether the first line goes on for more than is allowed."""
        return len(self._buffer) > self._most_record_bytes and not (
            0 <= self._buffer.find(b"\n") <= self._most_record_bytes
        )

    def _too_long(self) -> Records | None:
        """The record that is too long, once it has ended."""
        while True:
            end = self._buffer.find(b"\n") + 1
            text = self._buffer[: end or len(self._buffer)]
            if not self._skipped_text:
                self._skipped_text = text[:_SHOWN_BYTES]
            self._skipped_crc = zlib.crc32(text, self._skipped_crc)
            self._skipped += len(text)
            self._buffer = self._buffer[len(text) :]
            self._num_lines -= bool(end)
            self._open_bytes -= 0 if end else len(text)
            if end:
                break
            block = self._stream.more()
            if not block:
                return None
            self._add(block)
        reason = f"a record of {self._skipped - 1:,} bytes, more than {self._most_record_bytes:,}"
        size = self._skipped
        crc = self._skipped_crc
        self._skipped = 0
        self._skipped_crc = 0
        shown = self._skipped_text
        self._skipped_text = b""
        return self._one_bad(size, crc, reason, shown)

    def _again_too_long(self, range: Range) -> Records:
        records = self._too_long()
        if records is None and self._skipped == range.end - range.begin:
            records = self.take_leftover()
        if records is None:
            raise changed(range, "of which less is there now")
        check_same(range, records.range.crc)
        return records

    def _one_bad(self, size: int, crc: int, reason: str, shown: bytes) -> Records:
        assert self._columns is not None, "no record before the header"
        where = (self._partition, self._name, self._offset, self._offset + size, self._line)
        bad = {self._line + 1: reason}
        records = Records(Range(*where, 1, crc), b"", self._columns, self._layout, bad, shown)
        self._offset += size
        self._line += 1
        return records

    def _cut(self, size: int, num_records: int) -> Records:
        assert self._columns is not None, "no record before the header"
        lines = self._buffer[:size]
        converted = self._convert(lines, self._line + 1)
        where = (self._partition, self._name, self._offset, self._offset + size, self._line)
        range = Range(*where, num_records, zlib.crc32(lines))
        self._drop(size, num_records)
        return Records(range, converted.text, self._columns, self._layout, converted.bad, lines)

    def _drop(self, size: int, num_lines: int) -> None:
        self._buffer = self._buffer[size:]
        self._num_lines -= num_lines
        self._offset += size
        self._line += num_lines


def checked_lines(lines: bytes, first_line: int, layout: Layout, most_bytes: int) -> Lines:
    """Delimited text, in which a record is one line; what is none becomes an empty line.

    A quote that is not closed on its line would make records of several lines, and which ones would
    depend on what was there when they were read.
    """
    bad: dict[int, str] = {}
    parts = None
    if most_bytes < len(lines):
        parts = lines.split(b"\n")
        for place, line in enumerate(parts):
            if len(line) > most_bytes:
                reason = f"a record of {len(line):,} bytes, more than {most_bytes:,}"
                bad[first_line + place] = reason
                parts[place] = b""
    if layout.quotes and b'"' in lines:
        parts = lines.split(b"\n") if parts is None else parts
        for place in _unclosed(parts, layout):
            bad[first_line + place] = "a quote that is not closed on its line"
            parts[place] = b""
    return Lines(lines if parts is None else b"\n".join(parts), bad)


def _unclosed(parts: list[bytes], layout: Layout) -> list[int]:
    """Places of lines whose quotes go on behind their end."""
    nothing = np.empty(0, np.int64)
    text = b"\n".join(parts)
    first = 0
    unclosed: list[int] = []
    while True:
        buffer = np.frombuffer(text, np.uint8).copy()
        records = np.empty((text.count(b"\n") + 1, RECORD_ITEMS), np.int64)
        bounds = np.empty((len(records), 0, 2), np.int64)
        count = find_fields(buffer, ord(layout.separator), True, nothing, bounds, records)
        several = np.flatnonzero((records[:count, 4] > 1) | (records[:count, 5] != 0))
        if not len(several):
            return unclosed
        place = first + int(records[several[0], 3])
        unclosed.append(place)
        first = place + 1
        text = b"\n".join(parts[first:])
