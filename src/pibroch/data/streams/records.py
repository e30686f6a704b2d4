"""Records of a program of one's own: anything that gives them again from a number on."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping

from pibroch.data.schema import Schema
from pibroch.data.streams.base import Range, Records, changed, check_same
from pibroch.data.streams.json_lines import NO_RECORD, RecordText

MakeRecords = Callable[[int], Iterable["Mapping[str, object] | None"]]
"""Gives the records from a number on, by column; ``None`` when nothing is there for now."""
_PARTITION = "0"
_FILE = "records"


class RecordsOfProgram:
    """One partition, whose records a function gives.

    Args:
        make: the function.
        schema: of the records.
    """

    partitions = (_PARTITION,)

    def __init__(self, make: MakeRecords, schema: Schema) -> None:
        self._make = make
        self._texts = RecordText(schema)

    def open(self, partition: str) -> RecordsPartition:
        """See :class:`Source`."""
        return RecordsPartition(self._make, self._texts)

    def close(self) -> None:
        """See :class:`Source`."""


class RecordsPartition:
    """See :class:`Partition`."""

    name = _PARTITION
    order = ""
    is_waiting = False

    def __init__(self, make: MakeRecords, texts: RecordText) -> None:
        self._make = make
        self._texts = texts
        self._number = 0
        self._records: Iterator[Mapping[str, object] | None] | None = None

    def next(self, most_records: int) -> Records | None:
        """See :class:`Partition`."""
        if self._records is None:
            self._records = iter(self._make(self._number))
        first = self._number
        lines: list[bytes] = []
        bad: dict[int, str] = {}
        while len(lines) < most_records and (record := next(self._records, None)) is not None:
            self._number += 1
            try:
                lines.append(self._texts.of(record))
            except ValueError as error:
                bad[self._number] = str(error)
                lines.append(NO_RECORD)
        if not lines:
            return None
        text = b"".join(lines)
        where = (_PARTITION, _FILE, first, self._number, first)
        range = Range(*where, len(lines), zlib.crc32(text))
        return Records(range, text, self._texts.columns, self._texts.layout, bad)

    def again(self, range: Range) -> Records:
        """See :class:`Partition`."""
        if range.begin != self._number or self._records is None:
            self._number = range.begin
            self._records = None
        records = self.next(range.records)
        if records is None or records.range.records != range.records:
            raise changed(range, "which the program does not give any more")
        check_same(range, records.range.crc)
        return records

    def go_on_after(self, range: Range) -> None:
        """See :class:`Partition`."""
        self.again(range)

    def close(self) -> None:
        """See :class:`Partition`."""
        self._records = None
