"""Files mapped into memory, and whether they still are what they were when they were opened.

A map shows a file that is written to as it is now, and a read beyond the end of one that was cut
kills the process. So who reads asks for a look at the files first. What happens between that look
and the read, some milliseconds, is not seen.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np

from pibroch.errors import DataError, PibrochError
from pibroch.kernels.arrays import Array

LOOK_EVERY_S = 0.002
"""For each file: a look takes 2 to 4 µs, so looking costs 0.2 % of a loader's time at most."""


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Which file it is, and which state of it."""

    device: int
    inode: int
    size_bytes: int
    changed_ns: int

    @classmethod
    def of(cls, path: str | Path | int) -> Self | None:
        """The file at ``path``, or of a descriptor, as it is now; ``None`` when there is none."""
        try:
            status = os.stat(path)
        except OSError:
            return None
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class FileWatch:
    """Files that have to stay as they are while they are mapped.

    Args:
        refuse: makes the error for a file, from its path and how it was changed.
    """

    def __init__(self, refuse: Callable[[str, str], PibrochError]) -> None:
        self._refuse = refuse
        self._watched: list[tuple[str, str | BinaryIO, FileIdentity]] = []
        self._look_at = 0.0

    def add(self, path: str, opened: FileIdentity) -> None:
        """Watch what lies at a path.

        Raises:
            PibrochError: when it is not what it was when it was opened.
        """
        if (now := FileIdentity.of(path)) != opened:
            raise self.refusal(path, opened, now)
        self._watched.append((path, path, opened))

    def add_open(self, path: str, file: BinaryIO) -> None:
        """Watch an open file, which may lose its name, and is kept open."""
        opened = FileIdentity.of(file.fileno())
        assert opened is not None, "it is open"
        self._watched.append((path, file, opened))

    def joined(self, other: FileWatch) -> FileWatch:
        """A watch of all files of both."""
        both = FileWatch(self._refuse)
        both._watched = [*self._watched, *other._watched]
        return both

    def check(self) -> None:
        """Look whether the files are what they were, unless somebody has looked just now.

        Raises:
            PibrochError: naming the first one that was replaced, removed, cut or written to.
        """
        now = time.monotonic()
        if now < self._look_at:
            return
        for path, where, opened in self._watched:
            identity = FileIdentity.of(where if isinstance(where, str) else where.fileno())
            if identity != opened:
                raise self.refusal(path, opened, identity)
        self._look_at = now + LOOK_EVERY_S * len(self._watched)

    @property
    def paths(self) -> list[str]:
        """Of the files."""
        return [path for path, *_ in self._watched]

    def check_names(self) -> None:
        """As :meth:`check`, and look whether the paths still lead to the files that are watched."""
        for path, _, opened in self._watched:
            if (identity := FileIdentity.of(path)) != opened:
                raise self.refusal(path, opened, identity)

    def refusal(self, path: str, opened: FileIdentity, now: FileIdentity | None) -> PibrochError:
        """The error for a file."""
        if now is None:
            how = "removed"
        elif (now.device, now.inode) != (opened.device, opened.inode):
            how = "replaced by another file"
        elif now.size_bytes != opened.size_bytes:
            how = f"cut or extended from {opened.size_bytes:,} to {now.size_bytes:,} bytes"
        else:
            how = "written to"
        return self._refuse(path, how)


class MappedFiles:
    """Read-only maps of some files of a dataset.

    Args:
        folder: of the dataset.
        opened: its files by their names, as they were when it was opened.
    """

    def __init__(self, folder: Path, opened: Mapping[str, FileIdentity]) -> None:
        self._folder = folder
        self._opened = opened
        self._watch = FileWatch(_changed)

    def map(self, name: str, dtype: str, shape: Sequence[int]) -> Array:
        """A file as an array of this type and shape.

        Raises:
            DataError: when it is not any more what it was when the dataset was opened.
        """
        path = str(self._folder / name)
        opened = self._opened[name]
        try:
            array: Array = np.memmap(path, dtype, "r", shape=tuple(shape))
        except (OSError, ValueError) as error:
            raise self._watch.refusal(path, opened, FileIdentity.of(path)) from error
        self._watch.add(path, opened)  # after it was mapped: now it is known which file that was
        return array

    def check(self) -> None:
        """Look whether the files are what they were, unless somebody has looked just now.

        Raises:
            DataError: naming the first one that was replaced, removed, cut or written to.
        """
        self._watch.check()


def _changed(path: str, how: str) -> DataError:
    return DataError(
        f"{path}, which was {how} since the dataset was opened",
        "data that stay as they are while they are read",
        "prepare into another folder, or wait for those who read this one; a training run goes on"
        " with --resume",
    )
