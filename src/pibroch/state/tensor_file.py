"""Safetensors files that are written and read through one small buffer.

A memory map would be shorter, but its pages count in the process's peak memory, and a table may be
most of the machine.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import torch
from pydantic import Field

from pibroch.embedding.piece import RowArray
from pibroch.errors import TrainingError
from pibroch.kernels.arrays import Array
from pibroch.state.files import CHECKPOINT, FileDigest
from pibroch.untrusted import Refusal, checked, open_file, parse_json

BUFFER_BYTES = 1 << 20
"""Read and written at a time: what is gathered, checked, hashed and copied is in a cache."""
MAX_HEADER_BYTES = 100_000_000
"""As the safetensors library has it."""
_TYPE_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "complex64": "C64", "bool": "BOOL",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
}  # fmt: skip
_TYPES = {name: np.dtype(numpy_name) for numpy_name, name in _TYPE_NAMES.items()}
_TORCH_TYPES: dict[str, torch.dtype] = {
    **{name: getattr(torch, numpy_name) for numpy_name, name in _TYPE_NAMES.items()},
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_Size = Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]


@dataclass(frozen=True, slots=True)
class _Entry:
    """Of the header, for a tensor; ``data_offsets`` are counted from the header's end."""

    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]

    def __post_init__(self) -> None:
        if self.dtype not in _TORCH_TYPES:
            raise ValueError(f"a dtype of {', '.join(_TORCH_TYPES)}")
        if len(self.shape) > _MAX_DIMS:
            raise ValueError(f"at most {_MAX_DIMS} dimensions")
        start, end = self.data_offsets
        if end - start != math.prod(self.shape) * _TORCH_TYPES[self.dtype].itemsize:
            raise ValueError("offsets as far apart as dtype and shape need")


_MAX_DIMS = 32


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
    checksum = hashlib.sha256()
    size = 0
    with path.open("wb") as file:
        for piece in _file_pieces(streams, path, unchecked):
            checksum.update(piece)
            size += file.write(piece)
    return FileDigest(size, checksum.hexdigest())


def _file_pieces(
    streams: Mapping[str, Stream], path: Path, unchecked: Collection[str]
) -> Iterator[bytes | memoryview]:
    header = {}
    end = 0
    for name, stream in streams.items():
        start = end
        end = end + int(np.prod(stream.shape, dtype=np.int64)) * stream.dtype.itemsize
        offsets = [start, end]
        header[name] = {
            "dtype": stream.type_name or _TYPE_NAMES[stream.dtype.name],
            "shape": list(stream.shape),
            "data_offsets": offsets,
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name, stream in streams.items():
        for rows in stream.chunks:
            if name not in unchecked and rows.dtype.kind in "fc" and not np.isfinite(rows).all():
                raise TrainingError(
                    f"NaN or infinite numbers in {name!r}, to be saved as {path.name}",
                    "finite parameters",
                    "lower the learning rates or set train.clip_norm; the last checkpoint is"
                    " untouched",
                )
            yield np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data


class TensorFile:
    """A safetensors file to read, in a ``with`` block.

    Args:
        folder: that it is in.
        name: inside the folder.
        refusal: of a file that is damaged, or lacks a tensor.

    Attributes:
        path: of the file.

    Raises:
        CheckpointError: (or the refusal) when it is missing, or its header does not fit the file.
    """

    def __init__(self, folder: Path, name: str, refusal: Refusal = CHECKPOINT) -> None:
        self.path = folder / name
        self.refusal = refusal
        self._file = open_file(folder, name, refusal)
        try:
            self._entries, self._data_start = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
        return self._entry(name).shape

    def dtype(self, name: str) -> np.dtype[Any]:
        """Type of a tensor.

        Raises:
            CheckpointError: when the file has none of this name, or NumPy no such type.
        """
        entry = self._entry(name)
        if entry.dtype not in _TYPES:
            raise self.refusal(
                f"{name!r} of type {entry.dtype} in {self.path}", f"one of {', '.join(_TYPES)}"
            )
        return _TYPES[entry.dtype]

    def chunks(
        self, name: str, rows: range, rows_per_chunk: int | None = None
    ) -> Iterator[tuple[int, Array]]:
        """Rows ``rows.start`` to ``rows.stop`` of a tensor, in pieces that fit the buffer.

        Yields:
            The number of a piece's first row, and the piece ``[r, ...]``, valid until the next one
            is asked for.

        Raises:
            CheckpointError: when there is no such tensor, or it has fewer rows, or the file ends
                early.
        """
        entry = self._entry(name)
        dtype = self.dtype(name)
        if not entry.shape or rows.stop > entry.shape[0]:
            raise self.refusal(f"{name!r} {list(entry.shape)} in {self.path}", f"{rows.stop} rows")
        shape = entry.shape[1:]
        row_bytes = math.prod(shape) * dtype.itemsize
        step = rows_per_chunk or rows_that_fit(row_bytes)
        buffer = memoryview(
            bytearray(max(1, min(step, len(range(rows.start, rows.stop)))) * row_bytes)
        )
        for first in range(rows.start, rows.stop, step):
            part = buffer[: (min(first + step, rows.stop) - first) * row_bytes]
            self._read(entry.data_offsets[0] + first * row_bytes, part, name)
            yield first, np.frombuffer(part, dtype).reshape(-1, *shape)

    def mapped(self, name: str) -> Array:
        """A tensor where it lies in the file.

        Processes that map it share its memory until they write to it.

        Raises:
            CheckpointError: when there is no such tensor.
        """
        entry = self._entry(name)
        dtype = self.dtype(name)
        if entry.data_offsets[0] == entry.data_offsets[1]:
            return np.empty(entry.shape, dtype)
        start = self._data_start + entry.data_offsets[0]
        return np.asarray(np.memmap(self._file, dtype, "c", start, entry.shape))

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of them, read into memory.

        Raises:
            CheckpointError: when the file ends early.
        """
        tensors = {}
        for name, entry in self._entries.items():
            tensors[name] = torch.empty(entry.shape, dtype=_TORCH_TYPES[entry.dtype])
            data = tensors[name].reshape(-1).view(torch.uint8).numpy()
            self._read(entry.data_offsets[0], data.data, name)
        return tensors

    def _read_header(self) -> tuple[dict[str, _Entry], int]:
        """The entries by name, and where the tensors' bytes begin."""
        file_bytes = os.fstat(self._file.fileno()).st_size
        size = int.from_bytes(self._file.read(8), "little")
        if not 2 <= size <= min(file_bytes - 8, MAX_HEADER_BYTES):
            raise self.refusal(
                f"{self.path}, damaged: a header of {size:,} bytes in a file of {file_bytes:,}",
                "a safetensors file",
            )
        source = f"the header of {self.path}"
        content = parse_json(self._file.read(size), source, self.refusal)
        if isinstance(content, dict):
            content.pop("__metadata__", None)
        entries = checked(dict[str, _Entry], content, source, self.refusal)
        end = 0
        for name, entry in sorted(entries.items(), key=lambda each: each[1].data_offsets):
            if entry.data_offsets[0] != end:
                raise self.refusal(
                    f"{source}, damaged: {name!r} begins at {entry.data_offsets[0]}",
                    f"tensors end to end, so {end}",
                )
            end = entry.data_offsets[1]
        if end != file_bytes - 8 - size:
            raise self.refusal(
                f"{self.path} of {file_bytes:,} bytes", f"{end + 8 + size:,}, as its header says"
            )
        return entries, 8 + size

    def _read(self, start: int, part: memoryview, name: str) -> None:
        self._file.seek(self._data_start + start)
        if self._file.readinto(part) != len(part):
            raise self.refusal(f"{self.path}, which ends in the middle of {name!r}", "a whole file")

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise self.refusal(f"no {name!r} in {self.path}", "a file of this model")
        return self._entries[name]


def load_tensors(folder: Path, name: str, refusal: Refusal = CHECKPOINT) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file, read into memory.

    Raises:
        CheckpointError: (or the refusal) when it is missing or damaged.
    """
    with TensorFile(folder, name, refusal) as file:
        return file.tensors()


def rows_that_fit(row_bytes: int) -> int:
    """Rows that the buffer holds, at least one."""
    return max(1, BUFFER_BYTES // max(1, row_bytes))


def _chunks(array: RowArray) -> Iterator[Array]:
    """Views of consecutive rows, each of at most the buffer's size unless one row is larger."""
    rows = np.asarray(array).reshape(1, 1) if array.ndim == 0 else array
    rows_per_chunk = rows_that_fit(rows.nbytes // max(1, len(rows)))
    for start in range(0, len(rows) if array.nbytes else 0, rows_per_chunk):
        yield rows[start : start + rows_per_chunk]
