"""Rows of all tables in files.

Looked up where they lie; how they are written: :mod:`pibroch.state.exported_rows`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.embedding import Frozen, Table, features_of, group_tables
from pibroch.exchange.output import EmbeddingOutput, ReaderPlace
from pibroch.exchange.rows import BatchIds, resolve
from pibroch.kernels import overlay, quantise
from pibroch.kernels.arrays import Ints, distinct
from pibroch.models.build import pooling_of
from pibroch.state.export_format import EXPORT, ROWS, ExportManifest, RowShard
from pibroch.state.exported_ids import TableIds, read_ids, rows_of
from pibroch.state.exported_rows import RowVersions, check_written, row_bytes, written_as
from pibroch.state.tensor_file import TensorFile

logger = logging.getLogger(__name__)
# of which the equal ones take less time on their way, 8 KB for all at most, than to be found
_FEW_IDS = 256
_NO_ROWS: Ints = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class _MappedShard:
    """The mapped arrays of a shard that a kernel reads, and the first of its rows."""

    rows: NDArray[Any]
    first_row: int


def kernel_arrays(rows: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """Rows as the kernels take them."""
    if rows.dtype == np.uint8:
        return rows, rows.view(np.float32)
    return (rows.view(np.uint16) if rows.dtype == np.float16 else rows,)


@dataclass(frozen=True, slots=True)
class _Changes:
    """Rows with newer versions, which lie behind the export's last row.

    See :mod:`pibroch.kernels.overlay`.

    Attributes:
        changed: rows by place; empty where slots are those of all rows.
        slots: of rows.
        first: rows in the export.
        count: places.
    """

    changed: Ints
    slots: NDArray[np.int32]
    first: int
    count: int

    @classmethod
    def of(cls, newer: Sequence[Ints], first: int, before: Self | None) -> Self:
        """Rows of new versions, and those of versions before; ``first`` rows are in the export."""
        before = before or cls(_NO_ROWS, np.empty(0, np.int32), first, 0)
        rows = np.concatenate(newer)
        count = before.count + len(rows)
        if before.has_all_slots:
            slots = overlay.numbered(before.slots, rows, before.count)
            return cls(_NO_ROWS, slots, first, count)
        changed = np.concatenate([before.changed, rows])
        slots = overlay.slots_of(changed, first, before.slots, before.count)
        return cls(_NO_ROWS if len(slots) == first else changed, slots, first, count)

    @property
    def has_all_slots(self) -> bool:
        """Whether there is a slot for every row of the export."""
        return len(self.slots) == self.first

    @property
    def rows(self) -> Ints:
        """Those that changed, each once, rising."""
        return np.flatnonzero(self.slots >= 0) if self.has_all_slots else distinct(self.changed)

    def redirect(self, row_ids: Ints) -> Ints:
        """Where the newest versions of rows lie."""
        out = np.empty_like(row_ids)
        overlay.redirect(row_ids, self.changed, self.slots, self.first, out)
        return out


class MappedRows:
    """All tables of an export, read where they lie.

    Processes of one host share what they have read.

    Args:
        folder: of the export.
        manifest: its own.
        held: of the rows, those to map.

    Attributes:
        manifest: of the export.
        features: in the order of the model.
        num_rows: of all tables.
        row_bytes: of a row as it is written.

    Raises:
        DamagedCheckpointError: when a file does not fit the manifest.
    """

    def __init__(self, folder: Path, manifest: ExportManifest, held: range) -> None:
        readers = manifest.schema_.readers
        pooling = pooling_of(manifest.model)
        tables = [
            Table(table.name, table.num_rows, manifest.dim, readers[table.name], pooling)
            for table in manifest.tables
        ]
        self._places = {name: ReaderPlace(0, manifest.dim) for name in features_of(tables)}
        (self._tables,) = group_tables(tables, Frozen())
        self.features = self._tables.space.features
        self.manifest = manifest
        self.num_rows = sum(table.num_rows for table in tables)
        self.row_bytes = row_bytes(manifest.dim, manifest.dtype)
        shards = [shard for shard in manifest.shards if shard.meets(held)]
        self._shards = [_mapped(folder, shard, manifest, held) for shard in shards]
        self._arrays = [kernel_arrays(shard.rows) for shard in self._shards]
        self._where = _where(self._shards)
        self._file_ends = np.array([shard.first_row + shard.num_rows for shard in manifest.shards])
        self._changes: _Changes | None = None
        self._ids: dict[str, tuple[TableIds, ...]] = {
            name: (ids,) for name, ids in read_ids(folder, manifest.tables).items()
        }
        self._with_unknown_row = {table.name for table in manifest.tables if table.has_unknown_row}
        self._table_with_ids = {feature: name for name in self._ids for feature in readers[name]}
        self._add: Callable[..., None] = (
            quantise.add_bytes if manifest.dtype == "int8" else quantise.add_numbers
        )
        self._absent: frozenset[str] = frozenset()

    def changed(self, versions: Sequence[RowVersions], ids: Mapping[str, TableIds]) -> Self:
        """These tables with newer versions of some rows; both share all that is in memory.

        Args:
            versions: no two of which have the same row.
            ids: of tables of raw ids, what changed.
        """
        before = self._changes
        first = self.num_rows + (0 if before is None else before.count)
        newer = copy.copy(self)
        newer._ids = {
            name: (base, newest[0].with_changes(ids[name]) if newest else ids[name])
            for name, (base, *newest) in self._ids.items()
        }
        if not versions:
            return newer
        newer._shards = list(self._shards)
        for each in versions:
            newer._shards.append(_MappedShard(each.rows, first))
            first += len(each.row_ids)
        newer._where = _where(newer._shards)
        newer._changes = _Changes.of([each.row_ids for each in versions], self.num_rows, before)
        return newer

    @property
    def changed_rows(self) -> Ints:
        """Rows that are newer than the export's own, rising."""
        return _NO_ROWS if self._changes is None else self._changes.rows

    def id_changes(self, ids: Mapping[str, TableIds]) -> dict[str, TableIds]:
        """What makes ids of tables of raw ids those of tables here."""
        return {name: ids[name].changes_since(known) for name, known in self._ids.items()}

    def stored(self, row_ids: Ints) -> NDArray[Any]:
        """Rows as they are written, ``[V, W]``."""
        return self.exported(row_ids if self._changes is None else self._changes.redirect(row_ids))

    def exported(self, places: Ints) -> NDArray[Any]:
        """Rows ``[V, W]`` as the export itself has them, which are all here.

        Zeros for those of tables of raw ids that no file has.
        """
        if len(self._shards) == 1 and not self._ids:
            shard = self._shards[0]
            return shard.rows.take(places - shard.first_row, 0)
        rows = self.empty(len(places))
        quantise.take(places, *self._where, rows.view(np.uint16))
        return rows

    def empty(self, count: int) -> NDArray[Any]:
        """Room for rows as they are written, ``[V, W]``."""
        kind, width = written_as(self.manifest.dim, self.manifest.dtype)
        return np.empty((count, width), kind)

    def __call__(self, batch: JaggedBatch) -> Tensor | EmbeddingOutput:
        """Embeddings float32 ``[B, F, D]``; from any thread.

        Where the model wants them unpooled, each feature's by its name.

        Raises:
            RowIdError: for an id outside its table.
            DataError: for a batch without any of the features.
        """
        ids = self._resolved(batch)
        if self._changes is not None and not ids.one_hot:
            rows, places = rising(ids.row_ids)
            return self._pooling(rows, places, ids)(self.stored(rows))
        pooled_BFD = self._zeros(ids)
        bags = ids.offsets, ids.scale, pooled_BFD.numpy()
        if self._changes is not None:
            records = kernel_arrays(self.stored(ids.row_ids))
            self._add(*records, 0, np.arange(len(ids.row_ids)), *bags)
        else:
            for shard, arrays in zip(self._shards, self._arrays, strict=True):
                self._add(*arrays, shard.first_row, ids.row_ids, *bags)
        return self._given(pooled_BFD, ids)

    def _pooling(
        self, row_ids: Ints, places: Ints, ids: BatchIds
    ) -> Callable[[NDArray[Any]], Tensor | EmbeddingOutput]:
        """What makes, once, of rows that were taken from their files what a call gives.

        It takes them as they are written, ``[R, W]``. Sums have the order, and so the bits, that
        they have where an export's files are read, in whichever file a row's newest version lies.

        Args:
            row_ids: of the rows, rising.
            places: among these, of each id of the batch.
            ids: of the batch.
        """
        pooled_BFD = self._zeros(ids)
        bags = places, ids.offsets, ids.scale, pooled_BFD.numpy()
        ends = [0, *row_ids.searchsorted(self._file_ends).tolist(), len(row_ids)]
        of_files = [(first, end) for first, end in pairwise(ends) if first < end]

        def pooled(records: NDArray[Any]) -> Tensor | EmbeddingOutput:
            for first, end in of_files:
                self._add(*kernel_arrays(records[first:end]), first, *bags)
            return self._given(pooled_BFD, ids)

        return pooled

    def _given(self, pooled_BFD: Tensor, ids: BatchIds) -> Tensor | EmbeddingOutput:
        """What a call gives: where nothing is pooled, each id was a bag of its own."""
        if ids.bags is None:
            return pooled_BFD
        offsets = torch.from_numpy(ids.bags[0])
        return EmbeddingOutput(self._places, [pooled_BFD.flatten(1)], [offsets])

    def _resolved(self, batch: JaggedBatch) -> BatchIds:
        """A batch's rows and bags; raises as a call."""
        absent = frozenset(self.features).difference(batch.keys)
        if absent and len(absent) < len(self.features):
            if absent - self._absent:
                names = ", ".join(sorted(absent - self._absent))
                logger.warning(
                    "features absent from a batch count as empty bags, from now on silently: %s",
                    names,
                )
                self._absent |= absent
            batch = batch.with_empty(tuple(absent))
        batch = batch.select(self.features)
        if not self._ids:
            ids, problem = resolve(self._tables, batch)
        else:
            rows = self._rows_of_raw(batch)
            has_row = rows >= 0
            batch = replace(batch, values=torch.from_numpy(np.where(has_row, rows, 0)))
            ids, problem = resolve(self._tables, batch)
            if not has_row.all():  # the first row counts nothing for them
                scale = ids.scale if len(ids.scale) else np.float32(1)
                ids = replace(ids, scale=scale * has_row)
        if problem is not None:
            raise problem
        return ids

    def learned_ids(self, table: str) -> Ints | None:
        """Ids that have, or had, rows in a table that learns its ids, rising, int64 ``[U]``."""
        layers = self._ids.get(table)
        return None if layers is None else np.unique(np.concatenate([ids for ids, _ in layers]))

    def has_rows(self, feature: str, ids: Ints) -> NDArray[np.bool_]:
        """Which ids of a feature, int64 ``[V]``, have a row of their own."""
        name = self._table_with_ids.get(feature)
        return np.ones(len(ids), np.bool_) if name is None else rows_of(ids, self._ids[name]) >= 0

    def _rows_of_raw(self, batch: JaggedBatch) -> Ints:
        """A batch's values, with raw ids as rows; -1 for one that has none."""
        rows: Ints = batch.values.numpy().copy()
        bounds = batch.offsets.numpy()[:: max(1, batch.batch_size)].tolist()
        for feature, first, end in zip(batch.keys, bounds, bounds[1:], strict=False):
            if feature in self._table_with_ids:
                name = self._table_with_ids[feature]
                found = rows_of(rows[first:end], self._ids[name])
                rows[first:end] = np.maximum(found, 0) if name in self._with_unknown_row else found
        return rows

    def _zeros(self, ids: BatchIds) -> Tensor:
        """What bags are added to, ``[B, F, D]``."""
        return torch.zeros(ids.num_samples, ids.num_features, self._tables.space.dim)


def _where(shards: Sequence[_MappedShard]) -> tuple[Ints, Ints, Ints]:
    """First rows, numbers of rows and addresses of shards, as :func:`quantise.take` wants them."""
    shards = sorted((shard for shard in shards if len(shard.rows)), key=lambda each: each.first_row)
    assert all(shard.rows.flags.c_contiguous for shard in shards)
    return (
        np.array([shard.first_row for shard in shards], np.int64),
        np.array([len(shard.rows) for shard in shards], np.int64),
        np.array([shard.rows.ctypes.data for shard in shards], np.int64),
    )


def _mapped(folder: Path, shard: RowShard, manifest: ExportManifest, held: range) -> _MappedShard:
    """What of a shard is among the rows that are held, some of which are in it."""
    path = folder / shard.file
    with TensorFile(folder, shard.file, EXPORT) as file:
        rows = file.mapped(ROWS)
    check_written(path, rows, shard.num_rows, manifest.dim, manifest.dtype)
    first = max(held.start, shard.first_row)
    return _MappedShard(rows[first - shard.first_row : held.stop - shard.first_row], first)


def rising(row_ids: Ints) -> tuple[Ints, Ints]:
    """Row ids in rising order, and where among them each one is; of many, every one but once.

    >>> rising(np.array([7, 3, 5]))
    (array([3, 5, 7]), array([2, 0, 1]))
    """
    if len(row_ids) > _FEW_IDS:
        rows, places = np.unique(row_ids, return_inverse=True)
        return rows, places.astype(np.int64, copy=False).reshape(-1)
    order = row_ids.argsort()
    places = np.empty_like(row_ids)
    places[order] = np.arange(len(row_ids))
    return row_ids[order], places
