"""Which records each step is made of, written before the step is trained.

A step's records depend on what was there when it began, and so on clocks. So they are written down
once; a process that goes on after a death makes the same steps of the same records.
"""

from __future__ import annotations

import json
import os
import secrets
import zlib
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from pibroch.data.streams.base import Range
from pibroch.errors import DataError
from pibroch.storage import append_whole, storage_errors, whole_lines

STEPS_PER_FILE = 4096
_ROOM = ("a disk with room", "free some space, and go on with --resume")


class Journal:
    """A line for each step, in files of ``STEPS_PER_FILE`` steps at most; one process writes.

    Args:
        folder: of the files; made when absent.
        oldest_needed: gives the step after which a process may yet go on; files of steps before it
            are removed when a new one begins.

    Attributes:
        run: a name that no other run has; in a folder with steps theirs, once they were read.
        skipped: records that were left out, ``FILE:LINE``, as far as was read.

    Raises:
        StorageError: when the disk refuses.
    """

    def __init__(self, folder: Path, oldest_needed: Callable[[], int] = lambda: 0) -> None:
        self.run = secrets.token_hex(6)
        self.skipped: set[str] = set()
        self._folder = folder
        self._oldest_needed = oldest_needed
        self._lines = 0
        self._descriptor: int | None = None
        with storage_errors(folder, *_ROOM):
            folder.mkdir(parents=True, exist_ok=True)

    def steps_after(self, step: int) -> list[tuple[int, list[Range]]]:
        """The steps that were written down after one, rising; a line cut off by a death is none.

        Raises:
            DataError: when the next one is not there any more, or lines were changed.
        """
        found: list[tuple[int, list[Range]]] = []
        damaged = None  # the first line that is, of steps that are needed
        for path in self._files():
            for number, line in enumerate(whole_lines(path), 1):
                record = _record_in(line)
                if record is None:
                    damaged = damaged or f"line {number} of {path}, which is damaged"
                    continue
                self.run = record["run"]
                self.skipped.update(record.get("skip", ()))
                if "step" not in record:
                    continue
                if record["step"] <= step:  # so those before it are not needed either
                    damaged = None
                else:
                    ranges = [Range.of_plain(each) for each in record["ranges"]]
                    found.append((record["step"], ranges))
        if damaged is not None:
            raise DataError(
                f"{damaged}, and describes a step after {step}",
                "the lines as they were written: each has a checksum",
                "go on from a later checkpoint; or remove that line and all lines and files"
                " behind it: the records of these steps are then put into steps anew",
            )
        steps = [number for number, _ in found]
        if steps != list(range(step + 1, step + 1 + len(steps))):
            raise DataError(
                f"{self._folder} with steps {steps[0]} to {steps[-1]} after step {step}",
                f"each step from {step + 1} on",
                "go on from a later checkpoint, or put the journal back as it was",
            )
        return found

    def append(self, step: int, ranges: Sequence[Range]) -> None:
        """Write a step down; a process that is killed afterwards has written it.

        Raises:
            StorageError: when the disk refuses.
        """
        self._write(step, {"step": step, "ranges": [each.plain() for each in ranges]})

    def skip(self, places: Collection[str], step: int) -> None:
        """Have whoever goes on leave these records out, too; see :attr:`skipped`.

        Args:
            places: of the records.
            step: that is written down next.

        Raises:
            StorageError: when the disk refuses.
        """
        new = sorted(set(places) - self.skipped)
        if new:
            self._write(step, {"skip": new})
            self.skipped.update(new)

    def _write(self, step: int, record: dict[str, Any]) -> None:
        line = _line_of({**record, "run": self.run})
        with storage_errors(self._folder, *_ROOM):
            if self._descriptor is None:
                self._go_on()
            if self._descriptor is None or self._lines >= STEPS_PER_FILE:
                self._begin_file(step)
            assert self._descriptor is not None
            append_whole(self._descriptor, line)
        self._lines += 1

    def sync(self) -> None:
        """Have all steps so far on the disk, whatever happens to the machine.

        Raises:
            StorageError: when the disk refuses.
        """
        if self._descriptor is not None:
            with storage_errors(self._folder, *_ROOM):
                os.fsync(self._descriptor)

    def close(self) -> None:
        """Write no more."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _go_on(self) -> None:
        """Write behind the last line of an earlier process."""
        files = self._files()
        if files:
            self._lines = len(whole_lines(files[-1]))  # which cuts off half of a line
            self._open(files[-1])

    def _open(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def _begin_file(self, step: int) -> None:
        self.sync()
        self.close()
        self._open(self._folder / f"steps-{step:012d}.jsonl")
        self._lines = 0
        needed = self._oldest_needed()
        for path, following in pairwise(self._files()):
            if _first_step(following) <= needed + 1:
                path.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("steps-*.jsonl"))


def _first_step(path: Path) -> int:
    return int(path.stem.removeprefix("steps-"))


def _line_of(record: dict[str, Any]) -> bytes:
    """A record with the CRC-32 of its text, as a line."""
    text = json.dumps(record)
    return f'{text[:-1]}, "crc": {zlib.crc32(text.encode())}}}\n'.encode()


def _record_in(line: bytes) -> dict[str, Any] | None:
    """What :func:`_line_of` made a line of; ``None`` for another line."""
    try:
        record: dict[str, Any] = json.loads(line)
        crc = record.pop("crc")
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError):
        return None
    return record if crc == zlib.crc32(json.dumps(record).encode()) else None
