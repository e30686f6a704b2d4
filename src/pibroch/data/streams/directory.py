"""A directory that grows: files appear, or are appended to.

The order of a partition's files is that of their paths, so names rise in time, as dates and
counters do. A file has been read to its end when a later one is there and nothing more comes. What
breaks this rule and would leave records out is an error: ranges say which files have ended, and a
file of an earlier name that has not, or whose size is another, has records that nobody has read.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Protocol

from pibroch.data.layout import Layout
from pibroch.data.schema import Schema
from pibroch.data.streams.base import (
    Range,
    Records,
    changed,
    printable,
    read_errors,
    unreadable,
)
from pibroch.data.streams.json_lines import JsonLines
from pibroch.data.streams.listing import UNFINISHED, Listing
from pibroch.data.streams.rows import RowsFile, is_whole_parquet
from pibroch.data.streams.text import LEAST_BYTES, Lines, LinesFile, checked_lines
from pibroch.errors import DataError

logger = logging.getLogger(__name__)
_COMPRESSED = (".gz", ".gzip", ".zst", ".zstd")
_FORMATS = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
}
_LAST = "\U0010ffff"
"""Behind all names."""
PATIENCE_S = 10.0
"""How long the end of a file may be missing when a later file is there already."""
_NEWEST = 4
"""Files that ended last, of which each look sees whether they have changed."""
_OTHERS = 16
"""Further ones that each look sees to, in turn."""
_SHOWN = 3


class _OpenFile(Protocol):
    path: Path

    @property
    def raw_bytes(self) -> int: ...
    @property
    def identity(self) -> tuple[int, int]: ...
    @property
    def leftover(self) -> str | None: ...
    def next(self, most_records: int) -> Records | None: ...
    def again(self, range: Range) -> Records: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class FileFormat:
    """How files are read.

    Attributes:
        schema: of their records.
        name: ``csv``, ``tsv``, ``jsonl`` or ``parquet``; by each file's name when ``None``.
        most_record_bytes: of a line; longer ones are bad.
    """

    schema: Schema
    name: str | None = None
    most_record_bytes: int = 1 << 20

    def of(self, path: Path) -> str:
        """The format of a file.

        Raises:
            DataError: when its name does not say.
        """
        if self.name is not None:
            return self.name
        kind = _format_by_name(path)
        if kind is None:
            raise DataError(
                f"{path}, whose name does not say what it is",
                f"an ending such as {', '.join(_FORMATS)}, before .gz or .zst where compressed",
                "give the format of all files as `format`, or name the file otherwise",
            )
        return kind

    def is_ready(self, path: Path) -> bool:
        """Whether a file can be opened; one that is being written perhaps not yet."""
        if self.of(path) == "parquet":
            return is_whole_parquet(path)
        return path.stat().st_size >= LEAST_BYTES

    def open(self, path: Path, name: str, partition: str) -> _OpenFile:
        """Open a file that is ready."""
        kind = self.of(path)
        schema = self.schema
        if kind == "parquet":
            return RowsFile(path, name, partition, schema)
        most = self.most_record_bytes
        if kind == "jsonl":
            convert = JsonLines(schema, most)
            texts = convert.texts
            columns: tuple[str, ...] | None = texts.columns
            return LinesFile(path, name, partition, texts.layout, columns, convert, most)
        layout = Layout("\t" if kind == "tsv" else schema.separator, schema.quotes)

        def check(lines: bytes, first_line: int) -> Lines:
            return checked_lines(lines, first_line, layout, most)

        return LinesFile(path, name, partition, layout, schema.columns, check, most)


def _format_by_name(path: Path) -> str | None:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return _FORMATS.get(suffixes[-1]) if suffixes else None


class Directory:
    """A stream's directory, whose files are shared out to partitions.

    Args:
        path: of the directory.
        format: of the files.
        partitions: how many, to which files go by a hash of their paths; or the paths of
            sub-directories, each of which is one.

    Raises:
        DataError: when the directory is not there, or a partition lies in another.
    """

    def __init__(self, path: Path, format: FileFormat, partitions: int | Sequence[str]) -> None:
        if not path.is_dir():
            raise DataError(f"no directory {path}", "the stream's directory", "make it first")
        self.path = path
        self.format = format
        self._folders = None if isinstance(partitions, int) else tuple(partitions)
        self._count = partitions if isinstance(partitions, int) else 1
        _refuse_nested(self._folders or ())
        self._listings: dict[str, Listing] = {}

    @property
    def partitions(self) -> tuple[str, ...]:
        """See :class:`Source`."""
        # another count shares the files out otherwise, so its partitions have other names
        numbered = (f"{number} of {self._count}" for number in range(self._count))
        return self._folders or tuple(numbered)

    def open(self, partition: str) -> DirectoryPartition:
        """See :class:`Source`."""
        folder = partition if self._folders is not None else ""
        if folder not in self._listings:
            self._listings[folder] = Listing(self.path / folder, self._count)
        prefix = f"{folder}/" if folder else ""
        number = int(partition.split()[0]) if self._folders is None else 0
        return DirectoryPartition(partition, prefix, self._listings[folder], number, self.format)

    def close(self) -> None:
        """See :class:`Source`; says what was passed over because of its name."""
        for listing in self._listings.values():
            names = [printable(name) for name in listing.unfinished() if _is_data(name)]
            if names:
                logger.warning(
                    "%s: not read, as their names are those of files that are being written: %s%s",
                    listing.folder,
                    ", ".join(names[:_SHOWN]),
                    f" and {len(names) - _SHOWN:,} others" if len(names) > _SHOWN else "",
                )


def _is_data(name: str) -> bool:
    """Whether a file that is being written would have records by its name without that.

    >>> _is_data("day/.a.csv.gz.tmp"), _is_data("_SUCCESS"), _is_data(".a.csv.crc")
    (True, False, False)
    """
    for end in UNFINISHED:
        name = name.removesuffix(end)
    return _format_by_name(Path(name)) is not None


def _refuse_nested(folders: Sequence[str]) -> None:
    """Refuse folders in each other, whose files would be read twice."""
    paths = sorted(Path(os.path.normpath(folder)).parts for folder in folders)
    for outer, inner in pairwise(paths):
        if inner[: len(outer)] == outer:
            raise DataError(
                f"the partitions {'/'.join(outer)!r} and {'/'.join(inner)!r}, one in the other",
                "folders that lie beside each other: each is read with its sub-folders",
                "leave one of `data.stream.partitions` out",
            )


class DirectoryPartition:
    """See :class:`Partition`.

    Args:
        name: of the partition.
        prefix: of file names in ranges.
        listing: of its folder.
        number: its place in the listing.
        format: of the files.
    """

    def __init__(
        self, name: str, prefix: str, listing: Listing, number: int, format: FileFormat
    ) -> None:
        self.name = name
        self._prefix = prefix
        self._listing = listing
        self._number = number
        self._format = format
        self._file: _OpenFile | None = None
        self._file_name = ""
        self._ended: dict[str, int] = {}  # bytes by name, in the order in which files ended
        self._not_said: dict[str, int | None] = {}  # of these, for the next range
        self._names: list[str] = []
        self._looks = 0
        self._version = 0
        self._others: list[str] = []  # that ended, and are looked at in turn
        self._waits_since: float | None = None
        self._unread: str | None = None

    @property
    def order(self) -> str:
        """See :class:`Partition`: the oldest file first."""
        name = self._file_name if self._file is not None else self._later()
        return _LAST if name is None else name

    @property
    def is_waiting(self) -> bool:
        """See :class:`Partition`."""
        return self._waits_since is not None

    def next(self, most_records: int) -> Records | None:
        """See :class:`Partition`."""
        while True:
            if self._file is None and not self._open_next():
                return None
            assert self._file is not None, "opened"
            with read_errors(self._file.path):
                records = self._file.next(most_records)
                if records is None and self._later() is not None:
                    records = self._file.next(most_records)  # written before the later one came
                    if records is None:
                        if not self._may_end():
                            return None
                        records = self._take_leftover()
                        self._end()
                        if records is None:
                            continue
            if records is None:
                leftover = self._file.leftover
                self._unread = f"{self._file.path}: {leftover}" if leftover else None
                return None
            self._waits_since = None
            self._unread = None
            if self._not_said:
                records = replace(records, range=replace(records.range, ended=self._not_said))
                self._not_said = {}
            return records

    def again(self, range: Range) -> Records:
        """See :class:`Partition`."""
        name = range.file.removeprefix(self._prefix)
        for ended, size in range.ended.items():
            self._ended.pop(ended, None)
            if size is not None:
                self._ended[ended] = size
        self._version = 0  # what came meanwhile is before this file
        if name != self._file_name or self._file is None:
            self.close()
            path = self._listing.folder / name
            try:
                is_ready = self._is_ready(path)
                if is_ready:
                    self._file = self._format.open(path, range.file, self.name)
            except OSError as error:
                raise changed(range, f"which cannot be opened: {error.strerror}") from error
            if not is_ready:
                raise changed(range, "which is not whole now")
            self._file_name = name
        assert self._file is not None, "opened"
        with read_errors(self._file.path):
            return self._file.again(range)

    def go_on_after(self, range: Range) -> None:
        """See :class:`Partition`."""
        self.again(range)
        self._look()

    def close(self) -> None:
        """See :class:`Partition`; says what was there and could not be read yet."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._unread is not None:
            logger.warning("%s, which was not read", self._unread)
            self._unread = None

    def _look(self) -> None:
        """Have the names that are there, once nothing is wrong with them."""
        names = self._listing.names(self._number)
        if self._version != self._listing.version:
            self._check_names(names)
            self._check_sizes(self._newest() if self._version else list(self._ended))
            self._version = self._listing.version
        elif self._looks != self._listing.looks:
            self._check_sizes(self._newest())
        self._looks = self._listing.looks

    def _later(self) -> str | None:
        """The name of the file that follows, if it is there."""
        self._look()
        place = bisect_right(self._names, self._file_name)
        return self._names[place] if place < len(self._names) else None

    def _open_next(self) -> bool:
        while (name := self._later()) is not None:
            path = self._listing.folder / name
            with read_errors(path):
                size = path.stat().st_size
                if self._is_ready(path):
                    self._file = self._format.open(path, f"{self._prefix}{name}", self.name)
                    self._file_name = name
                    self._waits_since = None
                    self._unread = None
                    return True
            if not self._waited(name != self._names[-1]):
                self._unread = f"{path}: not whole yet" if size else None
                return False
            if size:
                raise DataError(
                    f"{path}, which is not whole, though later files are there",
                    "whole files, or names that end with .tmp until they are",
                    "finish or remove the file",
                )
            self._file_name = name
            self._add_ended(0)
        return False

    def _is_ready(self, path: Path) -> bool:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
            raise unreadable(path, "neither a file nor a folder")
        return self._format.is_ready(path)

    def _may_end(self) -> bool:
        """Whether a file of which nothing more comes has ended; one that ends oddly may go on."""
        assert self._file is not None
        leftover = self._file.leftover
        if leftover is None:
            return True
        if not self._waited(True):
            return False
        if not isinstance(self._file, LinesFile) or not self._file.may_be_cut:
            raise DataError(
                f"{self._file.path}, which ends with {leftover}, though later files are there",
                "whole files",
                "finish the file, or put a whole copy in its place and begin a new run",
            )
        return True

    def _take_leftover(self) -> Records | None:
        """The line without an end of a file that ends now, which is a bad record."""
        if not isinstance(self._file, LinesFile) or self._file.leftover is None:
            return None
        return self._file.take_leftover()

    def _end(self) -> None:
        assert self._file is not None
        self._add_ended(self._file.raw_bytes)
        self._file.close()
        self._file = None

    def _add_ended(self, size: int) -> None:
        self._ended[self._file_name] = size
        self._not_said[self._file_name] = size
        self._waits_since = None

    def _waited(self, is_late: bool) -> bool:
        """Whether something that is late has been waited for long enough."""
        now = time.monotonic()
        if not is_late:
            self._waits_since = None
            return False
        if self._waits_since is None:
            self._waits_since = now
        return now - self._waits_since > PATIENCE_S

    def _check_names(self, names: list[str]) -> None:
        """Refuse what would leave records out, and forget files that ended and are gone."""
        present = frozenset(names)
        for name in names[: bisect_right(names, self._file_name)]:
            if name not in self._ended and name != self._file_name:
                raise DataError(
                    f"{self._listing.folder / name}, which came after {self._file_name} was begun",
                    "files whose names rise, as they are read in the order of their names",
                    "give it a later name; of several writers each needs a folder that"
                    " `data.stream.partitions` names",
                )
        unread = self._names[bisect_right(self._names, self._file_name) :]
        if gone := next((name for name in unread if name not in present), None):
            raise DataError(
                f"{self._listing.folder / gone}, which was removed before it was read",
                "files that stay until they are read",
                "put it back; or go on without it: what it had is not trained",
            )
        self._names = names
        for name in [name for name in self._ended if name not in present]:
            del self._ended[name]
            self._not_said[name] = None

    def _newest(self) -> list[str]:
        """Names of files that ended last, and of some others in turn."""
        if not self._others:
            self._others = list(self._ended)
        others = self._others[-_OTHERS:]
        del self._others[-_OTHERS:]
        return [*islice(reversed(self._ended), _NEWEST), *others]

    def _check_sizes(self, ended: list[str]) -> None:
        """Refuse a file that was changed after it had been read."""
        for name in ended:
            size = self._ended.get(name)
            path = self._listing.folder / name
            if size is not None and _size_of(path) not in (size, None):
                raise DataError(
                    f"{path}, which was changed after it had been read to its end, at {size:,}"
                    " bytes",
                    "files that stay as they are once a later one is there",
                    "write what is new into a file with a later name",
                )
        if self._file is None:
            return
        with suppress(FileNotFoundError):  # removed: what was opened is still read
            found = self._file.path.stat()
            if (found.st_dev, found.st_ino) != self._file.identity:
                raise self._replaced("which was replaced by another file while it was read")
            if found.st_size < self._file.raw_bytes:
                raise self._replaced("which was cut while it was read")

    def _replaced(self, how: str) -> DataError:
        assert self._file is not None
        return DataError(
            f"{self._file.path}, {how}",
            "files to which is only appended",
            "write what is new into a file with a later name",
        )


def _size_of(path: Path) -> int | None:
    """Bytes of a file; ``None`` when it is gone."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
