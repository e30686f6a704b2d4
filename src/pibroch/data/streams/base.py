"""What a stream is made of: partitions, and ranges of records in them.

A range says where its records are and what their bytes add up to, so that the same records can be
read again, by any process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from pibroch.data.layout import Layout
from pibroch.data.parse import NO_INTEGERS, Integers
from pibroch.errors import CheckpointError, DataError

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True, slots=True)
class Range:
    """Consecutive records of a partition.

    Attributes:
        partition: by name.
        file: in which they are; topic and partition, where there are no files.
        begin, end: bytes of uncompressed text or rows of the file before and after them; offsets of
            a topic, of which some may have no message.
        line: lines or rows of the file before them, for messages.
        records: how many, bad ones included.
        crc: CRC-32 of their text, and of integers beside it.
        ended: files of the partition that were read to their end since the range before, with
            their bytes; ``None`` for one that was removed since. In a position: all that are there.
    """

    partition: str
    file: str
    begin: int
    end: int
    line: int
    records: int
    crc: int
    ended: Mapping[str, int | None] = field(default_factory=dict)

    def plain(self) -> list[Any]:
        """As JSON has it."""
        values = [getattr(self, each.name) for each in fields(self)]
        return values if self.ended else values[:-1]

    def after(self, before: Range | None) -> Range:
        """This range, with the files that ended up to the range before it."""
        ended = {} if before is None else before.ended
        if self.ended:
            both = {**ended, **self.ended}
            ended = {name: size for name, size in both.items() if size is not None}
        return replace(self, ended=ended) if ended or self.ended else self

    @classmethod
    def of_plain(cls, plain: Sequence[Any]) -> Range:
        """The inverse."""
        return cls(*plain)


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that was set aside: where it was, why, and the beginning of its text."""

    file: str
    line: int
    reason: str
    text: str


@dataclass(frozen=True, slots=True)
class Records:
    """A range with its text.

    Attributes:
        range: where it was.
        text: delimited; lines that are bad already are empty, or have too few columns.
        columns: of the text.
        layout: of the text.
        bad: reasons by line, of lines that are bad already.
        original: the lines as they were read, where ``text`` is made of them.
        integers: columns beside the text.
        rows: of which both are made.
        whole: of a file's records, more that lie together, with these among them; decoded once.
        numbers: of the lines, rising, where they do not follow on one another.
    """

    range: Range
    text: bytes
    columns: tuple[str, ...]
    layout: Layout
    bad: Mapping[int, str] = field(default_factory=dict)
    original: bytes | None = None
    integers: Integers = NO_INTEGERS
    rows: pl.DataFrame | None = None
    whole: Records | None = None
    numbers: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """Where a stream stands after a step.

    Attributes:
        step: of the stream, from 1; 0 before the first.
        samples: of all ranks in all steps so far.
        records: read so far, those set aside included.
        bad: set aside so far.
        places: of each partition that was read the last range.
    """

    step: int = 0
    samples: int = 0
    records: int = 0
    bad: int = 0
    places: Mapping[str, Range] = field(default_factory=lambda: MappingProxyType({}))

    def after(self, ranges: Sequence[Range], samples: int, bad: int) -> StreamPosition:
        """After a further step."""
        places = dict(self.places)
        for each in ranges:
            places[each.partition] = each.after(places.get(each.partition))
        records = self.records + sum(each.records for each in ranges)
        totals = self.step + 1, self.samples + samples, records, self.bad + bad
        return StreamPosition(*totals, places)

    def plain(self) -> dict[str, object]:
        """As a checkpoint has it."""
        places = {name: range.plain() for name, range in sorted(self.places.items())}
        numbers = {name: getattr(self, name) for name in ("step", "samples", "records", "bad")}
        return {**numbers, "places": places}

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> StreamPosition:
        """The inverse.

        Raises:
            CheckpointError: for something else, such as a position in a data set.
        """
        try:
            places = {name: Range.of_plain(range) for name, range in plain["places"].items()}
            step, samples, records, bad = (
                int(plain[name]) for name in ("step", "samples", "records", "bad")
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                "a data position that is none of a stream",
                "the position that a stream was saved with",
                "resume with the data of the saved run",
            ) from error
        return cls(step, samples, records, bad, places)


class Partition(Protocol):
    """A part of a stream whose records have an order; read by one rank at a time.

    Attributes:
        name: of it.
    """

    name: str

    @property
    def order(self) -> str:
        """Partitions with less are read first."""
        ...

    @property
    def is_waiting(self) -> bool:
        """Whether more must come, or else is an error."""
        ...

    def next(self, most_records: int) -> Records | None:
        """What comes next, at least one record; ``None`` when nothing is there yet.

        Raises:
            DataError: for what cannot be read, and cannot be set aside record by record.
        """
        ...

    def again(self, range: Range) -> Records:
        """Records that were read before; :meth:`next` goes on behind them.

        Raises:
            DataError: when they are not there any more, or are others.
        """
        ...

    def go_on_after(self, range: Range) -> None:
        """Let :meth:`next` go on behind records that were read before.

        Raises:
            DataError: as :meth:`again`.
        """
        ...

    def close(self) -> None:
        """Let go of files and connections."""
        ...


class Source(Protocol):
    """Where a stream comes from."""

    @property
    def partitions(self) -> tuple[str, ...]:
        """Names of all partitions, the same on all ranks and in all processes of a run."""
        ...

    def open(self, partition: str) -> Partition:
        """A partition, at its beginning."""
        ...

    def close(self) -> None:
        """Let go of what partitions share."""
        ...


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Turn what the system says of a file or folder that cannot be read into a DataError."""
    try:
        yield
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from error


def unreadable(path: Path, why: str) -> DataError:
    """The error for a file or folder that is to be read, and cannot be."""
    return DataError(
        f"{printable(path)}, which cannot be read: {why}",
        "files and folders that can be read, and stay until they are",
        "look at it, and at what it leads to if it is a link",
    )


def printable(path: str | Path) -> str:
    r"""A path as text, whatever bytes it is made of.

    >>> printable("a\udcff.csv")
    'a\\xff.csv'
    """
    return os.fsencode(path).decode(errors="backslashreplace")


def check_same(range: Range, crc: int) -> None:
    """Raise DataError unless a range was read again as it was."""
    if crc != range.crc:
        raise changed(range, "whose records are others now")


def changed(range: Range, how: str) -> DataError:
    """The error for what was trained on, or is to be trained on again, and is not the same."""
    return DataError(
        f"{range.file} from {range.begin:,} to {range.end:,}, {how}",
        "what the run has read there before",
        "put the file back as it was, or begin a new run",
    )
