"""Safetensors files that are written and read through one small buffer.

A memory map would be shorter, but its pages count in the process's peak memory, and a table may be most of the machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from pibroch.embedding.piece import RowArray
from pibroch.embedding.storage import FileDigest
from pibroch.errors import CheckpointError, TrainingError
from pibroch.kernels.arrays import Array

BUFFER_BYTES = 8 << 20
_TYPE_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "complex64": "C64", "bool": "BOOL",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
}  # fmt: skip
_TYPES = {name: np.dtype(numpy_name) for numpy_name, name in _TYPE_NAMES.items()}


@dataclass(frozen=True, slots=True)
class Stream:
    """A tensor that comes into being while it is written.

    Attributes:
        dtype: of all its numbers.
        shape: of the whole.
        chunks: arrays of consecutive rows that make the whole; read once.
        type_name: what the file calls the type, where NumPy has another of that size in its place.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    chunks: Iterable[Array]
    type_name: str | None = None

    @classmethod
    def of(cls, array: RowArray) -> Stream:
        """An array, which may be a strided view, in views of consecutive rows."""
        return cls(array.dtype, array.shape, _chunks(array))


def write_tensors(
    path: Path, tensors: Mapping[str, RowArray | Stream], unchecked: Collection[str] = ()
) -> FileDigest:
    """Write a safetensors file; arrays may be strided views and are never copied whole.

    Args:
        path: of the file.
        tensors: by name.
        unchecked: names of those that may have NaN and infinite numbers.

    Raises:
        TrainingError: when a number is NaN or infinite.
        OSError: when the disk refuses.
    """
    streams = {
        name: one if isinstance(one, Stream) else Stream.of(one) for name, one in tensors.items()
    }
    checksum, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for piece in _file_pieces(streams, path, unchecked):
            checksum.update(piece)
            size += file.write(piece)
    return FileDigest(size, checksum.hexdigest())


def _file_pieces(
    streams: Mapping[str, Stream], path: Path, unchecked: Collection[str]
) -> Iterator[bytes | memoryview]:
    header, end = {}, 0
    for name, stream in streams.items():
        start, end = end, end + int(np.prod(stream.shape, dtype=np.int64)) * stream.dtype.itemsize
        offsets = [start, end]
        header[name] = {
            "dtype": stream.type_name or _TYPE_NAMES[stream.dtype.name], "shape": list(stream.shape), "data_offsets": offsets
        }  # fmt: skip
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name, stream in streams.items():
        for rows in stream.chunks:
            if name not in unchecked and rows.dtype.kind in "fc" and not np.isfinite(rows).all():
                raise TrainingError(
                    f"NaN or infinite numbers in {name!r}, to be saved as {path.name}",
                    "finite parameters",
                    "lower the learning rates or set train.clip_norm; the last checkpoint is untouched",
                )
            yield np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data


class TensorFile:
    """A safetensors file to read, in a ``with`` block."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb")
        size = int.from_bytes(self._file.read(8), "little")
        entries = json.loads(self._file.read(size))
        if not isinstance(entries, dict):
            raise CheckpointError(
                f"{path}, which begins as no safetensors file does", "a safetensors file"
            )
        self._entries: dict[str, Any] = entries
        self._entries.pop("__metadata__", None)
        self._data_start = 8 + size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    @property
    def names(self) -> set[str]:
        """Of its tensors."""
        return set(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor.

        Raises:
            CheckpointError: when the file has none of this name.
        """
        return tuple(self._entry(name)["shape"])

    def chunks(
        self, name: str, rows: range, rows_per_chunk: int | None = None
    ) -> Iterator[tuple[int, Array]]:
        """Consecutive rows of a tensor from ``rows.start`` to ``rows.stop``, in pieces that fit the buffer.

        Yields:
            The number of a piece's first row, and the piece ``[r, ...]``, valid until the next one is asked for.

        Raises:
            CheckpointError: when there is no such tensor, or the file ends early.
        """
        entry = self._entry(name)
        dtype, shape = _TYPES[entry["dtype"]], tuple(entry["shape"][1:])
        row_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        step = rows_per_chunk or rows_that_fit(row_bytes)
        buffer = memoryview(
            bytearray(max(1, min(step, len(range(rows.start, rows.stop)))) * row_bytes)
        )
        for first in range(rows.start, rows.stop, step):
            part = buffer[: (min(first + step, rows.stop) - first) * row_bytes]
            self._file.seek(self._data_start + entry["data_offsets"][0] + first * row_bytes)
            if self._file.readinto(part) != len(part):
                raise CheckpointError(
                    f"{self.path}, which ends in the middle of {name!r}", "a whole file"
                )
            yield first, np.frombuffer(part, dtype).reshape(-1, *shape)

    def mapped(self, name: str) -> Array:
        """A tensor where it lies in the file; processes that map it share its memory until they write to it.

        Raises:
            CheckpointError: when there is no such tensor, or the file ends early.
        """
        entry = self._entry(name)
        dtype, shape, start = (
            _TYPES[entry["dtype"]],
            tuple(entry["shape"]),
            self._data_start + entry["data_offsets"][0],
        )
        num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if start + num_bytes > self.path.stat().st_size or start < 0 or num_bytes < 0:
            raise CheckpointError(
                f"{self.path}, which ends in the middle of {name!r}", "a whole file"
            )
        if not num_bytes:
            return np.empty(shape, dtype)
        return np.asarray(np.memmap(self._file, dtype, "c", start, shape))

    def _entry(self, name: str) -> dict[str, Any]:
        if name not in self._entries:
            raise CheckpointError(
                f"no {name!r} in {self.path}", "a file of this model", "use another checkpoint"
            )
        entry: dict[str, Any] = self._entries[name]
        return entry


def rows_that_fit(row_bytes: int) -> int:
    """Rows that the buffer holds, at least one."""
    return max(1, BUFFER_BYTES // max(1, row_bytes))


def _chunks(array: RowArray) -> Iterator[Array]:
    """Views of consecutive rows, each of at most the buffer's size unless one row is larger."""
    rows = np.asarray(array).reshape(1, 1) if array.ndim == 0 else array
    rows_per_chunk = rows_that_fit(rows.nbytes // max(1, len(rows)))
    for start in range(0, len(rows) if array.nbytes else 0, rows_per_chunk):
        yield rows[start : start + rows_per_chunk]
