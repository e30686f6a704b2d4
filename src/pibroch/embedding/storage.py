"""Files that are either whole or absent: streamed safetensors with checksums, and folders that appear in one rename.

Arrays are written and read through one small buffer. A memory map would be shorter, but its pages count in the process's
peak memory, and a table may be most of the machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pibroch.errors import CheckpointError, StorageError, TrainingError

BUFFER_BYTES = 8 << 20
_TYPE_NAMES = {"float32": "F32", "float64": "F64", "int64": "I64", "int32": "I32", "uint8": "U8", "bool": "BOOL"}

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class FileDigest:
    """What a file must look like."""

    size_bytes: int
    sha256: str


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes ``folder``, which must not exist, when the block ends without an error.

    Its files and its name are on the disk when the block has ended. After an error nothing is left.

    Raises:
        StorageError: when the disk refuses.
    """
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        for path in sorted(temporary.rglob("*"), reverse=True):
            _flush_to_disk(path)
        _flush_to_disk(temporary)
        temporary.rename(folder)
        _flush_to_disk(folder.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise StorageError(
                f"{error.strerror or error} while saving {folder}",
                "a disk with room for the checkpoint",
                "free some space and run again with --resume; earlier checkpoints are untouched",
            ) from error
        raise


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left of their `atomic_folder` inside ``folder``."""
    for path in folder.glob(".*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def write_tensors(path: Path, tensors: Mapping[str, Array]) -> FileDigest:
    """Write a safetensors file; arrays may be strided views and are never copied whole.

    Raises:
        TrainingError: when a number is NaN or infinite.
        OSError: when the disk refuses.
    """
    header, end = {}, 0
    for name, array in tensors.items():
        start, end = end, end + array.nbytes
        header[name] = {
            "dtype": _TYPE_NAMES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    checksum, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for piece in _pieces(len(text).to_bytes(8, "little") + text, tensors, path):
            checksum.update(piece)
            size += file.write(piece)
    return FileDigest(size, checksum.hexdigest())


def read_into(path: Path, targets: Mapping[str, Array]) -> None:
    """Fill arrays, which may be strided views, with the tensors of the same names.

    Raises:
        CheckpointError: when a tensor is missing or of another shape or type.
    """
    header, data_start = _read_header(path)
    buffer = memoryview(bytearray(BUFFER_BYTES))
    with path.open("rb") as file:
        for name, target in targets.items():
            entry = header.get(name, {})
            found = (entry.get("dtype"), tuple(entry.get("shape", ())))
            wanted = (_TYPE_NAMES[target.dtype.name], target.shape)
            if found != wanted:
                raise CheckpointError(f"{name!r} {found} in {path}", f"{wanted}", "use a checkpoint of this model")
            file.seek(data_start + entry["data_offsets"][0])
            for rows in _chunks(target):
                part = buffer[: rows.nbytes] if rows.nbytes <= BUFFER_BYTES else memoryview(bytearray(rows.nbytes))
                file.readinto(part)
                rows[...] = np.frombuffer(part, rows.dtype).reshape(rows.shape)


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of a file's tensors."""
    return {name: tuple(entry["shape"]) for name, entry in _read_header(path)[0].items()}


def verify_file(path: Path, digest: FileDigest) -> None:
    """Read a file once and compare.

    Raises:
        CheckpointError: when it is missing, cut short or changed; names the file.
    """
    do = "use another checkpoint, or delete this one to resume from the one before"
    if not path.is_file():
        raise CheckpointError(f"no {path}", "the file that the manifest names", do)
    size = path.stat().st_size
    if size != digest.size_bytes:
        raise CheckpointError(f"{path} of {size} bytes", f"{digest.size_bytes} bytes, as its manifest says", do)
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != digest.sha256:
            raise CheckpointError(f"{path}, whose bytes changed since it was saved", "an undamaged file", do)


def _pieces(header: bytes, tensors: Mapping[str, Array], path: Path) -> Iterator[bytes | memoryview]:
    yield header
    for name, array in tensors.items():
        for rows in _chunks(array):
            if rows.dtype.kind == "f" and not np.isfinite(rows).all():
                raise TrainingError(
                    f"NaN or infinite numbers in {name!r}, to be saved as {path.name}",
                    "finite parameters",
                    "lower the learning rates or set train.clip_norm; the last checkpoint is untouched",
                )
            yield np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data


def _chunks(array: Array) -> Iterator[Array]:
    """Views of consecutive rows, each of at most the buffer's size unless one row is larger."""
    rows_2d = array.reshape(1, 1) if array.ndim == 0 else array
    num_rows = len(rows_2d)
    rows_per_chunk = max(1, BUFFER_BYTES // max(1, rows_2d.nbytes // max(1, num_rows)))
    for start in range(0, num_rows if array.size else 0, rows_per_chunk):
        yield rows_2d[start : start + rows_per_chunk]


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return header, 8 + size


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
