"""Rows of all tables in files: float32, float16 or row-wise int8, written shard by shard and looked up where they lie.

A shard is a safetensors file with one tensor ``rows``: float32 or float16 ``[R, D]``, or uint8 ``[R, W]`` as
:mod:`pibroch.kernels.quantise.naive` describes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.embedding import Frozen, Table, group_tables
from pibroch.embedding.tensor_file import Stream, TensorFile
from pibroch.errors import DamagedCheckpointError, TrainingError
from pibroch.exchange.rows import resolve
from pibroch.kernels import parallel
from pibroch.kernels.arrays import Records
from pibroch.kernels.quantise import numba as fast
from pibroch.kernels.quantise.naive import record_bytes
from pibroch.serve.export_format import ROWS, ExportDtype, ExportManifest, RowShard

logger = logging.getLogger(__name__)
ROWS_PER_THREAD = 4096
_MOST_OF_FLOAT16 = float(np.finfo(np.float16).max)


def row_bytes(dim: int, dtype: ExportDtype) -> int:
    """Bytes of a row of ``dim`` weights."""
    return {"float32": 4 * dim, "float16": 2 * dim, "int8": record_bytes(dim)}[dtype]


def row_stream(dim: int, dtype: ExportDtype, num_rows: int, chunks: Iterator[Records]) -> Stream:
    """The tensor of a shard, made while it is written from float32 weights ``[r, D]`` in consecutive chunks."""
    kinds: dict[str, tuple[type[Any], int]] = {
        "float32": (np.float32, dim), "float16": (np.float16, dim), "int8": (np.uint8, record_bytes(dim))
    }  # fmt: skip
    kind, width = kinds[dtype]
    return Stream(np.dtype(kind), (num_rows, width), (_encoded(chunk, dtype) for chunk in chunks))


def _encoded(weights: Records, dtype: ExportDtype) -> NDArray[Any]:
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
        records = np.empty((len(weights), record_bytes(weights.shape[1])), np.uint8)
        whole = np.ascontiguousarray(weights)
        parallel.run(fast.quantise, len(records), whole, records, records.view(np.float32), grain=ROWS_PER_THREAD)
        return records
    return weights.astype(np.float16 if dtype == "float16" else np.float32)


@dataclass(frozen=True, slots=True)
class _MappedShard:
    """The arrays that a kernel reads of a shard, in the file's own memory, and the first of its rows."""

    arrays: tuple[NDArray[Any], ...]
    first_row: int


class MappedRows:
    """All tables of an export, read where they lie: processes of one host share what they have read.

    Args:
        folder: of the export.
        manifest: its own.

    Raises:
        DamagedCheckpointError: when a file does not fit the manifest.
    """

    def __init__(self, folder: Path, manifest: ExportManifest) -> None:
        tables = [Table(table.name, table.num_rows, manifest.dim) for table in manifest.tables]
        (self._tables,) = group_tables(tables, Frozen())
        self._shards = [_mapped(folder, shard, manifest) for shard in manifest.shards]
        self._add = fast.add_bytes if manifest.dtype == "int8" else fast.add_numbers
        self._absent: frozenset[str] = frozenset()
        _check_rows(folder, manifest)

    @property
    def features(self) -> tuple[str, ...]:
        """In the order of the model."""
        return self._tables.space.features

    def __call__(self, batch: JaggedBatch) -> Tensor:
        """Pooled embeddings float32 ``[B, F, D]``; from any thread.

        Raises:
            RowIdError: for an id outside its table.
            DataError: for a batch without any of the features.
        """
        absent = frozenset(self.features).difference(batch.keys)
        if absent and len(absent) < len(self.features):
            if absent - self._absent:
                names = ", ".join(sorted(absent - self._absent))
                logger.warning("features absent from a batch count as empty bags, from now on silently: %s", names)
                self._absent |= absent
            batch = batch.with_empty(tuple(feature for feature in self.features if feature in absent))
        ids, problem = resolve(self._tables, batch.select(self.features))
        if problem is not None:
            raise problem
        pooled_BFD = torch.zeros(ids.num_samples, ids.num_features, self._tables.space.dim)
        num_bags, out = len(ids.offsets) - 1, pooled_BFD.numpy()
        for shard in self._shards:
            parallel.run(self._add, num_bags, *shard.arrays, shard.first_row, ids.row_ids, ids.offsets, ids.scale, out)
        return pooled_BFD


def _mapped(folder: Path, shard: RowShard, manifest: ExportManifest) -> _MappedShard:
    path = folder / shard.file
    with TensorFile(path) as file:
        rows = file.mapped(ROWS)
    width = {"float32": manifest.dim, "float16": manifest.dim, "int8": record_bytes(manifest.dim)}[manifest.dtype]
    kind = {"float32": np.float32, "float16": np.float16, "int8": np.uint8}[manifest.dtype]
    if rows.shape != (shard.num_rows, width) or rows.dtype != kind:
        raise DamagedCheckpointError(
            f"{path} with {rows.dtype} {list(rows.shape)}",
            f"{np.dtype(kind)} {[shard.num_rows, width]}",
            "export again",
        )
    if manifest.dtype == "int8":
        return _MappedShard((rows, rows.view(np.float32)), shard.first_row)
    return _MappedShard((rows.view(np.uint16) if manifest.dtype == "float16" else rows,), shard.first_row)


def _check_rows(folder: Path, manifest: ExportManifest) -> None:
    """Raise unless tables and shards lie end to end and hold the same rows."""
    parts: tuple[Sequence[Any], ...] = (manifest.tables, manifest.shards)
    ends = []
    for kind in parts:
        end = 0
        for part in kind:
            if part.first_row != end:
                break
            end += part.num_rows
        ends.append((end, sum(part.num_rows for part in kind)))
    if len({end for pair in ends for end in pair}) != 1:
        raise DamagedCheckpointError(f"{folder}, whose tables and shards do not fit", "rows end to end", "export again")
