"""Rows as exports and deltas have them: float32, float16 or row-wise int8.

A file of an export is a safetensors file with one tensor ``rows``: float32 or float16 ``[R, D]``,
or uint8 ``[R, W]`` as :mod:`pibroch.kernels.quantise` describes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pibroch.errors import TrainingError
from pibroch.kernels import quantise
from pibroch.kernels.arrays import Ints, Records
from pibroch.state.export_format import EXPORT, ROWS, ExportDtype
from pibroch.state.tensor_file import Stream, TensorFile

_MOST_OF_FLOAT16 = float(np.finfo(np.float16).max)


class RowVersions(NamedTuple):
    """Some rows as they are now.

    Their ids among the rows of all tables, rising, and their bytes ``[r, W]``.
    """

    row_ids: Ints
    rows: NDArray[Any]


def row_bytes(dim: int, dtype: ExportDtype) -> int:
    """Bytes of a row of ``dim`` weights."""
    return {"float32": 4 * dim, "float16": 2 * dim, "int8": quantise.record_bytes(dim)}[dtype]


def written_as(dim: int, dtype: ExportDtype) -> tuple[type[Any], int]:
    """Type and width of rows of ``dim`` weights."""
    width = quantise.record_bytes(dim) if dtype == "int8" else dim
    return {"float32": np.float32, "float16": np.float16, "int8": np.uint8}[dtype], width


def row_stream(dim: int, dtype: ExportDtype, num_rows: int, chunks: Iterator[Records]) -> Stream:
    """The tensor of a shard, made while it is written.

    From float32 weights ``[r, D]`` in consecutive chunks.
    """
    kind, width = written_as(dim, dtype)
    return Stream(np.dtype(kind), (num_rows, width), (encoded(chunk, dtype) for chunk in chunks))


def encoded(weights: Records, dtype: ExportDtype) -> NDArray[Any]:
    """Rows as they are written.

    Raises:
        TrainingError: for numbers that are not finite, or too large for float16.
    """
    largest = float(np.abs(weights).max(initial=0))
    if not np.isfinite(largest) or (dtype == "float16" and largest > _MOST_OF_FLOAT16):
        raise TrainingError(
            f"an embedding weight of {largest:g} to be exported as {dtype}",
            "finite ones" if dtype != "float16" else f"at most {_MOST_OF_FLOAT16:g}",
            "export another checkpoint, or as float32",
        )
    if dtype == "int8":
        records = np.empty((len(weights), quantise.record_bytes(weights.shape[1])), np.uint8)
        whole = np.ascontiguousarray(weights)
        quantise.quantise(whole, records)
        return records
    return weights.astype(np.float16 if dtype == "float16" else np.float32)


def check_finite(folder: Path, name: str) -> None:
    """Read the rows in a file once.

    Raise DamagedCheckpointError for one with NaN or infinite numbers.

    Reads through a small buffer: a map's pages would count as this process's memory.
    """
    with TensorFile(folder, name, EXPORT) as file:
        for first, chunk in file.chunks(ROWS, range(*file.shape(ROWS)[:1])):
            numbers = chunk
            if chunk.dtype == np.uint8:  # of int8 rows scale and offset
                numbers = np.ascontiguousarray(chunk[:, :8]).view(np.float32)
            if not _all_finite(numbers):
                row = first + int(np.flatnonzero(~np.isfinite(numbers).all(1))[0])
                raise EXPORT(
                    f"NaN or infinite numbers in row {row:,} of {file.path}", "finite numbers"
                )


def _all_finite(numbers: NDArray[Any]) -> bool:
    if numbers.dtype == np.float16:  # NumPy's own check of these takes ten times as long
        return bool((numbers.view(np.uint16) & 0x7FFF).max(initial=0) < 0x7C00)
    return bool(np.isfinite(numbers).all())


def check_written(
    path: Path, rows: NDArray[Any], num_rows: int, dim: int, dtype: ExportDtype
) -> None:
    """Raise DamagedCheckpointError unless a file has as many rows of the type as manifests say."""
    kind, width = written_as(dim, dtype)
    if rows.shape != (num_rows, width) or rows.dtype != kind:
        need = f"{np.dtype(kind)} {[num_rows, width]}"
        raise EXPORT(f"{path} with {rows.dtype} {list(rows.shape)}", need)
