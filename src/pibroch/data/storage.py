"""Writing to disk: refusals are a StorageError, and half a file never counts as a whole one."""

from __future__ import annotations

import json
import os
import weakref
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from pibroch.errors import DataError
from pibroch.kernels.arrays import Array
from pibroch.storage import new_file, storage_errors, whole_lines

_CHECKSUM_BLOCK_BYTES = 1 << 22


class ArrayFile:
    """A raw little-endian array on disk that is written piece by piece.

    Not memory-mapped: a full disk is an error here, where a mapped write would kill the process.
    """

    def __init__(self, path: Path, dtype: str) -> None:
        self.path = path
        self._dtype = np.dtype(dtype).newbyteorder("<")
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(
                path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644
            )
        # one that is given up, as its data are refused, is closed with this object
        self._end = weakref.finalize(self, os.close, self._descriptor)

    def write_at(self, position: int, values: Array) -> None:
        """Write items from item ``position`` on."""
        data = memoryview(values.astype(self._dtype, copy=False).tobytes())
        offset = position * self._dtype.itemsize
        with storage_errors(self.path):
            while data:
                written = _write_at(self._descriptor, data, offset)
                data = data[written:]
                offset = offset + written

    def read_at(self, position: int, num_items: int) -> Array:
        """Items that were written, from item ``position`` on."""
        size = num_items * self._dtype.itemsize
        offset = position * self._dtype.itemsize
        data = bytearray()
        with storage_errors(self.path):
            while len(data) < size:
                part = _read_at(self._descriptor, size - len(data), offset + len(data))
                assert part, "read behind what was written"
                data += part
        return np.frombuffer(data, self._dtype)

    def close(self, num_items: int) -> None:
        """Cut the file to ``num_items`` and bring it to the disk."""
        with storage_errors(self.path):
            os.ftruncate(self._descriptor, num_items * self._dtype.itemsize)
            os.fsync(self._descriptor)
            self._end()


def _write_at(descriptor: int, data: memoryview, offset: int) -> int:
    if hasattr(os, "pwrite"):
        return int(os.pwrite(descriptor, data, offset))
    os.lseek(descriptor, offset, os.SEEK_SET)  # Windows
    return os.write(descriptor, data)


def _read_at(descriptor: int, size: int, offset: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(descriptor, size, offset)
    os.lseek(descriptor, offset, os.SEEK_SET)  # Windows
    return os.read(descriptor, size)


def write_json(path: Path, content: object) -> None:
    """Write a JSON file in one step: it is there whole or not at all."""
    with new_file(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)


def read_json_lines(path: Path) -> list[Any]:
    """The whole lines of a file, see :func:`whole_lines`.

    Raises:
        DataError: for a line that is none of JSON.
    """
    found = []
    for number, line in enumerate(whole_lines(path), 1):
        try:
            found.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"line {number} of {path}, which is damaged",
                "lines of JSON, as they were written",
                "put the file back as it was, or remove that line",
            ) from error
    return found


def checksum(path: Path) -> int:
    """CRC-32 of a file's bytes."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_CHECKSUM_BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
    return crc
