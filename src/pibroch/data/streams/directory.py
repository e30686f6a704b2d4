"""A directory that grows: files appear, or are appended to.

The order of a partition's files is that of their names, so names rise in time, as dates and
counters do. A file has been read to its end when a later one is there and nothing more comes. What
breaks this rule and would leave records out is an error.
"""

from __future__ import annotations

import os
import time
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pibroch.data.layout import Layout
from pibroch.data.schema import Schema
from pibroch.data.streams.base import Range, Records, changed
from pibroch.data.streams.json_lines import JsonLines
from pibroch.data.streams.rows import RowsFile, is_whole_parquet
from pibroch.data.streams.text import LEAST_BYTES, Lines, LinesFile, checked_lines
from pibroch.errors import DataError

_UNFINISHED = (".tmp", ".temp", ".part", ".partial", ".inprogress", ".crdownload", "~")
"""Ends of names that files have while they are written; so have those that begin with . or _."""
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
LOOK_AGAIN_S = 0.2
"""Between two looks at a directory."""
PATIENCE_S = 10.0
"""How long the end of a file may be missing when a later file is there already."""
_WATCHED_FILES = 4
"""That were read to their end, of which it would be noticed that they grow."""


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
        suffixes = [suffix.lower() for suffix in path.suffixes]
        if suffixes and suffixes[-1] in _COMPRESSED:
            suffixes.pop()
        if not suffixes or suffixes[-1] not in _FORMATS:
            raise DataError(
                f"{path}, whose name does not say what it is",
                f"an ending such as {', '.join(_FORMATS)}, before .gz or .zst where compressed",
                "give the format of all files as `format`, or name the file otherwise",
            )
        return _FORMATS[suffixes[-1]]

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


class Directory:
    """A stream's directory, whose files are shared out to partitions.

    Args:
        path: of the directory.
        format: of the files.
        partitions: how many, to which files go by a hash of their names; or the names of
            sub-directories, each of which is one.

    Raises:
        DataError: when the directory is not there.
    """

    def __init__(self, path: Path, format: FileFormat, partitions: int | Sequence[str]) -> None:
        if not path.is_dir():
            raise DataError(f"no directory {path}", "the stream's directory", "make it first")
        self.path = path
        self.format = format
        self._folders = None if isinstance(partitions, int) else tuple(partitions)
        self._count = partitions if isinstance(partitions, int) else 1
        self._listings: dict[str, Listing] = {}

    @property
    def partitions(self) -> tuple[str, ...]:
        """See :class:`Source`."""
        return self._folders or tuple(map(str, range(self._count)))

    def open(self, partition: str) -> DirectoryPartition:
        """See :class:`Source`."""
        folder = partition if self._folders is not None else ""
        if folder not in self._listings:
            self._listings[folder] = Listing(self.path / folder, self._count)
        prefix = f"{folder}/" if folder else ""
        number = 0 if folder else int(partition)
        return DirectoryPartition(partition, prefix, self._listings[folder], number, self.format)

    def close(self) -> None:
        """See :class:`Source`."""


class Listing:
    """The names of a folder's files, by partition; looked at again every now and then."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self._count = count
        self._looked_at = 0.0
        self._names: list[list[str]] = [[] for _ in range(count)]
        self.looks = 0

    def names(self, number: int) -> list[str]:
        """Of a partition's files that are not being written, rising."""
        now = time.monotonic()
        if not self.looks or now - self._looked_at >= LOOK_AGAIN_S:
            self._look()
            self._looked_at = now
        return self._names[number]

    def _look(self) -> None:
        names: list[list[str]] = [[] for _ in range(self._count)]
        try:
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    name = entry.name
                    if name[0] in "._" or name.endswith(_UNFINISHED) or not entry.is_file():
                        continue
                    names[zlib.crc32(name.encode()) % self._count].append(name)
        except FileNotFoundError:
            if self.looks:
                raise DataError(
                    f"no directory {self.folder} any more", "the stream's directory"
                ) from None
        for each in names:
            each.sort()
        self._names = names
        self.looks += 1


@dataclass(slots=True)
class _Ended:
    """Files that were read to their end: name and bytes, the newest last."""

    sizes: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, size: int) -> None:
        self.sizes[name] = size
        while len(self.sizes) > _WATCHED_FILES:
            del self.sizes[next(iter(self.sizes))]


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
        self._looks = 0
        self._known: frozenset[str] | None = None
        self._ended = _Ended()
        self._waits_since: float | None = None

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
            records = self._file.next(most_records)
            if records is None and self._later() is not None:
                records = self._file.next(most_records)  # written before the later file appeared
                if records is None:
                    if not self._may_end():
                        return None
                    records = self._take_leftover()
                    self._end()
                    if records is None:
                        continue
            if records is not None:
                self._waits_since = None
            return records

    def again(self, range: Range) -> Records:
        """See :class:`Partition`."""
        name = range.file.removeprefix(self._prefix)
        if name != self._file_name or self._file is None:
            if self._file is not None:
                self._file.close()
            path = self._listing.folder / name
            try:
                is_ready = self._format.is_ready(path)
            except OSError as error:
                raise changed(range, f"which cannot be opened: {error.strerror}") from error
            if not is_ready:
                raise changed(range, "which is not whole now")
            self._file = self._format.open(path, range.file, self.name)
            self._file_name = name
        return self._file.again(range)

    def go_on_after(self, range: Range) -> None:
        """See :class:`Partition`."""
        self.again(range)

    def close(self) -> None:
        """See :class:`Partition`."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _names(self) -> list[str]:
        names = self._listing.names(self._number)
        if self._looks != self._listing.looks:
            self._looks = self._listing.looks
            self._check(names)
        return names

    def _later(self) -> str | None:
        """The name of the file that follows, if it is there."""
        names = self._names()
        place = bisect_right(names, self._file_name)
        return names[place] if place < len(names) else None

    def _open_next(self) -> bool:
        name = self._later()
        if name is None:
            return False
        path = self._listing.folder / name
        try:
            is_ready = self._format.is_ready(path)
        except FileNotFoundError:  # removed since, before it was read
            raise DataError(
                f"{path}, which was removed before it was read",
                "files that stay until they are read",
            ) from None
        if not is_ready:
            return self._waits_for(path)
        self._file = self._format.open(path, f"{self._prefix}{name}", self.name)
        self._file_name = name
        self._waits_since = None
        return True

    def _waits_for(self, path: Path) -> bool:
        """Whether a file that is not whole may be passed over: an empty one, after a while."""
        if self._waited(any(name > path.name for name in self._names())):
            if path.stat().st_size:
                raise DataError(
                    f"{path}, which is not whole, though later files are there",
                    "whole files, or names that end with .tmp until they are",
                    "finish or remove the file",
                )
            self._file_name = path.name
            return self._open_next()
        return False

    def _may_end(self) -> bool:
        """Whether a file of which nothing more comes has ended; one that ends oddly may go on."""
        assert self._file is not None
        leftover = self._file.leftover
        if leftover is None:
            return True
        if not self._waited(True):
            return False
        if not isinstance(self._file, LinesFile) or not self._file.is_complete:
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
        self._ended.add(self._file_name, self._file.raw_bytes)
        self._file.close()
        self._file = None
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

    def _check(self, names: list[str]) -> None:
        """Refuse what would leave records out, or has changed what was read."""
        now_known = frozenset(names)
        new = now_known - self._known if self._known is not None else frozenset()
        late = sorted(name for name in new if name < self._file_name)
        self._known = now_known
        if late:
            raise DataError(
                f"{self._listing.folder / late[0]}, which came after {self._file_name} was begun",
                "files whose names rise, as they are read in the order of their names",
                "give it a later name",
            )
        for name, size in self._ended.sizes.items():
            path = self._listing.folder / name
            if name in now_known and path.stat().st_size != size:
                raise DataError(
                    f"{path}, which was changed after it had been read to its end, at {size:,}"
                    " bytes",
                    "files that stay as they are once a later one is there",
                    "write what is new into a file with a later name",
                )
        if self._file is not None and self._file_name in now_known:
            stat = self._file.path.stat()
            if (stat.st_dev, stat.st_ino) != self._file.identity:
                raise self._replaced("which was replaced by another file while it was read")
            if stat.st_size < self._file.raw_bytes:
                raise self._replaced("which was cut while it was read")

    def _replaced(self, how: str) -> DataError:
        assert self._file is not None
        return DataError(
            f"{self._file.path}, {how}",
            "files to which is only appended",
            "write what is new into a file with a later name",
        )
