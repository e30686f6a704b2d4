"""The files of a folder and of its sub-folders, by partition, as they come and go.

A look reads only folders that may have changed since the last one, and the next look waits in
proportion to what the last one took: a folder of 100,000 files costs a twentieth of a core.
"""

from __future__ import annotations

import logging
import os
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from pibroch.data.streams.base import printable, unreadable
from pibroch.errors import DataError

logger = logging.getLogger(__name__)
UNFINISHED = (".tmp", ".temp", ".part", ".partial", ".inprogress", ".crdownload", "~")
"""Ends of names that files have while they are written; so have those that begin with . or _."""
LOOK_AGAIN_S = 0.2
"""Between two looks at least."""
SHARE_OF_TIME = 20
"""Looks take one part of so many."""
_SETTLED_S = 3.0
"""The coarsest clock of a file system: a later change has another time than an earlier one."""
_TRUSTED_S = 60.0
"""After which a folder is read again whatever its times say: some file systems keep none."""


@dataclass(slots=True)
class _Folder:
    """A folder as it was read.

    Attributes:
        stamp: its identity and times, which change with its names.
        since: when this stamp was first seen.
        read_at: when its names were read.
        files, folders: paths of what lies in it, below the root.
        unfinished: names that it has of files that are being written.
    """

    stamp: tuple[int, ...] = ()
    since: float = 0.0
    read_at: float = 0.0
    files: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)

    def may_have_changed(self, stamp: tuple[int, ...], now: float) -> bool:
        """Whether it must be read again, and note its stamp.

        >>> folder = _Folder((1, 5), since=10.0, read_at=10.0)
        >>> folder.may_have_changed((1, 5), 11.0)  # names may come within one tick of its clock
        True
        >>> folder.read_at = 14.0
        >>> folder.may_have_changed((1, 5), 15.0), folder.may_have_changed((1, 6), 15.0)
        (False, True)
        """
        if stamp != self.stamp:
            self.stamp = stamp
            self.since = now
            return True
        return self.read_at - self.since < _SETTLED_S or now - self.read_at > _TRUSTED_S


class Listing:
    """The paths of a folder's files below it, by partition.

    Args:
        folder: the root; it may come later.
        count: of partitions, to which files go by a hash of their paths.

    Attributes:
        looks: how many there were.
        version: of the names; rises when they change.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.looks = 0
        self.version = 0
        self._count = count
        self._look_at = 0.0
        self._folders: dict[str, _Folder] = {}
        self._names: list[list[str]] = [[] for _ in range(count)]
        self._links: set[str] = set()
        self._was_there = False

    def names(self, number: int) -> list[str]:
        """Of a partition's files that are not being written, rising.

        Raises:
            DataError: for a folder that cannot be read, a root that is there no more, and names
                that are not UTF-8.
        """
        begun = time.monotonic()
        if not self.looks or begun >= self._look_at:
            self._look(begun)
            ended = time.monotonic()
            self._look_at = ended + max(LOOK_AGAIN_S, (ended - begun) * SHARE_OF_TIME)
        return self._names[number]

    def unfinished(self) -> list[str]:
        """Paths of what is there and was passed over, as its name is of what is being written."""
        return sorted(name for each in self._folders.values() for name in each.unfinished)

    def _look(self, now: float) -> None:
        self.looks += 1
        before = self._folders
        self._folders = {}  # an error lets the next look read all
        folders: dict[str, _Folder] = {}
        has_changed = False
        left = [""]
        while left:
            path = left.pop()
            folder = before.get(path, _Folder())
            try:
                has_changed |= self._read(path, folder, now)
            except (FileNotFoundError, NotADirectoryError):
                if path:  # removed since the folder around it was read
                    continue
                self._refuse_absence()
                return
            except OSError as error:
                raise unreadable(self.folder / path, error.strerror or str(error)) from error
            folders[path] = folder
            left += folder.folders
        if has_changed or folders.keys() != before.keys():
            self._names = self._shared_out(folders)
            self.version += 1
        self._folders = folders
        self._was_there = True

    def _refuse_absence(self) -> None:
        """Raise DataError for a root that was there; say once that one is not there yet."""
        if self._was_there:
            raise DataError(f"no directory {self.folder} any more", "the stream's directory")
        if self.looks == 1:
            logger.warning("no directory %s yet, which is a partition of the stream", self.folder)

    def _read(self, path: str, folder: _Folder, now: float) -> bool:
        """Read a folder if it may have changed; whether its names have."""
        stat = os.stat(self.folder / path)
        stamp = (stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns)
        if not folder.may_have_changed(stamp, now):
            return False
        before = (folder.files, folder.folders)
        prefix = f"{path}/" if path else ""
        folder.files = []
        folder.folders = []
        folder.unfinished = []
        with os.scandir(self.folder / path) as entries:
            for entry in entries:
                name = entry.name
                if name[0] in "._" or name.endswith(UNFINISHED):
                    folder.unfinished.append(prefix + name)
                elif entry.is_dir(follow_symlinks=False):
                    folder.folders.append(prefix + name)
                elif entry.is_symlink() and os.path.isdir(entry.path):
                    self._warn_of_link(entry.path)
                else:
                    folder.files.append(prefix + name)
        folder.files.sort()
        folder.folders.sort()
        folder.read_at = now
        return before != (folder.files, folder.folders)

    def _shared_out(self, folders: dict[str, _Folder]) -> list[list[str]]:
        names: list[list[str]] = [[] for _ in range(self._count)]
        for folder in folders.values():
            for name in folder.files:
                try:
                    key = name.encode()
                except UnicodeEncodeError:
                    raise DataError(
                        f"{self.folder} with a file {printable(name)}, whose name is not UTF-8",
                        "names in UTF-8",
                        "give it another name",
                    ) from None
                names[zlib.crc32(key) % self._count].append(name)
        for each in names:
            each.sort()
        return names

    def _warn_of_link(self, path: str) -> None:
        if path not in self._links:
            self._links.add(path)
            logger.warning(
                "%s is a link to a folder, whose files are not read: links may lead to a folder"
                " twice; name it in `partitions`, or put the folder itself there",
                printable(path),
            )
