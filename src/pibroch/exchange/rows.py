"""What every exchange does with a minibatch: resolve ids, pool rows, group ids by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pibroch.data import JaggedBatch
from pibroch.data.batch import one_hot_offsets
from pibroch.embedding import RowSpace, TableGroup
from pibroch.embedding.columns import Columns, alone
from pibroch.embedding.rows import NO_ROWS, NO_SCALE, rising
from pibroch.errors import RowIdError
from pibroch.kernels import dedupe as grouping
from pibroch.kernels import gather_pool as pooling
from pibroch.kernels import parallel
from pibroch.kernels import route as routing
from pibroch.kernels import scatter_update as updating
from pibroch.kernels.arrays import Ints, Records, Stored
from pibroch.kernels.scatter_update import Grouped

IDS_PER_FEATURE = 1024  # of which at most an eighth is not fetched ahead
MOST_IDS = 65536  # of several tables at once, so that what is grouped stays in the caches
IDS_PER_THREAD = 4096  # ids below which a further thread is not worth waking to group them


class Readers(NamedTuple):
    """How the features of one space or lane read their tables.

    Attributes:
        num_features: F.
        mean: bool ``[F]``, whether bags are averaged; ``None`` where none are.
        is_pooled: whether bags are pooled at all.
        shares_tables: whether some table is read by several features.
    """

    num_features: int
    mean: NDArray[np.bool_] | None
    is_pooled: bool
    shares_tables: bool


@dataclass(frozen=True, slots=True)
class BatchIds:
    """The ids of a batch as rows; shapes as in :mod:`pibroch.kernels.gather_pool`.

    Attributes:
        row_ids: int64 ``[V]``; between ranks, addresses.
        offsets: int64 ``[F * B + 1]``.
        scale: float32 ``[V]``, factor of each id in its bag's sum, or empty when all are 1.
        one_hot: whether each bag holds exactly one id.
        num_features: F.
        shares_tables: whether some table is read by several features.
        bags: the batch's own offsets and F, where nothing is pooled: then ``offsets`` has a bag for
            each id, all of one feature, so that pooling copies rows.
        columns: where the features have their embeddings; in a tensor of their own where absent.
        first_rows: int64 ``[F]``, from which each feature's rows are counted; empty for 0.
    """

    row_ids: Ints
    offsets: Ints
    scale: Records
    one_hot: bool
    num_features: int
    shares_tables: bool
    bags: tuple[Ints, int] | None = None
    columns: Columns | None = None
    first_rows: Ints = field(default_factory=lambda: NO_ROWS)

    @classmethod
    def of(
        cls,
        row_ids: Ints,
        batch: JaggedBatch,
        readers: Readers,
        columns: Columns | None,
        first_rows: Ints = NO_ROWS,
    ) -> BatchIds:
        """Of a batch whose ids were resolved to rows."""
        scale = NO_SCALE if batch.by_id else pooling_scale(batch, readers.mean)
        num_ids = len(row_ids)
        offsets = batch.offsets.numpy()
        if readers.is_pooled and not batch.by_id:
            is_one = is_one_hot(batch)
            shares = readers.shares_tables
            num_features = readers.num_features
            return cls(
                row_ids, offsets, scale, is_one, num_features, shares, None, columns, first_rows
            )
        each = np.arange(num_ids + 1)
        return cls(
            row_ids, each, scale, True, 1, readers.shares_tables, (offsets, readers.num_features)
        )

    @property
    def num_samples(self) -> int:
        """B, the number of samples."""
        return (len(self.offsets) - 1) // self.num_features

    def gradient_rows(self, gradient: Tensor) -> Records:
        """The gradient of :func:`pool`'s result as rows, which :func:`group` numbers."""
        return gradient.numpy().reshape(
            -1, gradient.shape[-1] if self.columns is None else self.columns.unit
        )


def resolve(of_tables: TableGroup, batch: JaggedBatch) -> tuple[BatchIds, RowIdError | None]:
    """The ids of a batch with the group's features as row ids of its row space.

    Also returns the error for an id that has no row.
    """
    space = of_tables.space
    offsets = batch.offsets.numpy()
    rows = space.index_of_readers.rows_of(batch)
    row_ids = np.empty(len(rows), np.int64)
    problem = None
    first_bad = pooling.resolve_rows(
        rows, offsets, space.first_row_of_feature, space.num_rows_of_feature, row_ids
    )
    if first_bad >= 0:
        problem = space.index_of_readers.error(batch, first_bad)
    return BatchIds.of(row_ids, batch, _readers(space), of_tables.columns), problem


def _readers(space: RowSpace) -> Readers:
    mean = space.mean_of_feature if space.averages else None
    return Readers(len(space.features), mean, space.is_pooled, space.shares_tables)


def resolve_to_read(
    of_tables: TableGroup, batch: JaggedBatch
) -> tuple[BatchIds, RowIdError | None]:
    """As :func:`resolve`, for rows that are only pooled: those of each feature from its first on.

    No row ids are written, which takes as long as a fifth of the pooling. Features of few ids have
    them: the kernel fetches rows some places ahead, and with another feature's first row it would
    fetch others.
    """
    space = of_tables.space
    num_ids = batch.values.shape[0]
    if batch.by_id or not space.is_pooled or num_ids < IDS_PER_FEATURE * len(space.features):
        return resolve(of_tables, batch)
    rows = space.index_of_readers.rows_of(batch)
    first_bad = pooling.first_absent(rows, batch.offsets.numpy(), space.num_rows_of_feature)
    problem = space.index_of_readers.error(batch, first_bad) if first_bad >= 0 else None
    first_rows = space.first_row_of_feature
    return BatchIds.of(rows, batch, _readers(space), of_tables.columns, first_rows), problem


def spans_of(space: RowSpace, batch: JaggedBatch) -> list[slice]:
    """For each reader the span of its ids among those of all tables of a space."""
    offsets = batch.offsets_of(space.features)
    size = batch.batch_size
    ends = [int(offsets[place * size]) for place in range(len(space.features) + 1)]
    return [slice(start, end) for start, end in pairwise(ends)]


def room_for(groups: Sequence[TableGroup], batch: JaggedBatch) -> Tensor | None:
    """Room for pooled embeddings of all groups, ``[B, S]``, which :func:`pool` fills.

    ``None`` for a batch that has none.
    """
    width = next((each.columns.width for each in groups if each.columns is not None), None)
    return None if width is None or batch.by_id else torch.empty(batch.batch_size, width)


def pool(
    ids: BatchIds,
    records: Stored,
    rows: NDArray[np.signedinteger],
    dim: int,
    room_BS: Tensor | None = None,
) -> Tensor:
    """Pool records in the type of their weights, position v's ``rows[v]``.

    Pooled embeddings are written to their columns of ``room_BS``, which is returned. Those without
    columns get a tensor of their own, ``[B, F * D]``, or where nothing is pooled ``[V, D]``.
    """
    columns = ids.columns
    if columns is None:
        columns = alone(ids.num_features, dim)
        room_BS = torch.empty(ids.num_samples, columns.width)
    assert room_BS is not None, "see room_for"
    if not records.flags.c_contiguous:  # all rows are one where a simulation counts them
        records = records[:1]
        rows = np.zeros_like(rows)
    pooling.gather_pool(
        records,
        rows,
        ids.first_rows,
        ids.offsets,
        ids.scale,
        columns.first,
        dim,
        columns.unit,
        room_BS.numpy(),
    )
    return room_BS


def pooling_scale(batch: JaggedBatch, mean_of_feature: NDArray[np.bool_] | None) -> Records:
    """Factor of each id in its bag's sum, or empty when all are 1; not to be written to."""
    weights = (
        NO_SCALE if batch.weights is None else batch.weights.detach().contiguous().float().numpy()
    )
    if mean_of_feature is None:
        return weights
    scale = np.empty(batch.values.numel(), np.float32)
    pooling.pooling_scale(batch.offsets.numpy(), weights, mean_of_feature, scale)
    return scale


def group(ids: BatchIds, bounds: list[int] | None = None) -> Grouped:
    """Group a batch's positions by row, each row's in sample order.

    Rows rise within each of the ``bounds``.

    Args:
        ids: of the batch.
        bounds: of positions for each thread, which may share no row; one range when absent, so that
            all rows rise.
    """
    num_ids = len(ids.row_ids)
    bounds = [0, num_ids] if bounds is None else bounds
    if ids.shares_tables:
        sequence = np.empty(num_ids, np.int32)
        grouping.sample_major_sequence(*(ids.bags or (ids.offsets, ids.num_features)), sequence)
    else:
        sequence = rising(num_ids)
    rows = np.empty(num_ids, np.int64)
    order = np.empty(num_ids, np.int32)
    segments = np.empty(num_ids + 1, np.int32)
    counts = grouping.dedupe(ids.row_ids, sequence, bounds, rows, segments, order)
    num_rows = 0
    for start, count in zip(bounds, counts, strict=False):
        for array in (rows, segments):
            array[num_rows : num_rows + count] = array[start : start + count]
        num_rows += count
    segments[num_rows] = num_ids
    columns = alone(ids.num_features, 1) if ids.columns is None else ids.columns
    if ids.bags is not None:
        source = rising(num_ids)
    elif ids.one_hot:
        source = one_hot_sources(ids.num_samples, columns)
    else:
        source = np.empty(num_ids, np.int32)
        pooling.gradient_sources(ids.offsets, columns.first_rows, columns.rows_per_sample, source)
    return Grouped(
        rows[:num_rows],
        segments[: num_rows + 1],
        order,
        source,
        ids.scale,
        rows_per_gradient=columns.dim // columns.unit,
    )


@dataclass(frozen=True, slots=True)
class DistinctRows:
    """This rank's part of a batch, by distinct row.

    Attributes:
        ids: of the batch; rows are addresses.
        grouped: the same by distinct address, rising, so that each owner's are consecutive.
        places: int64 ``[V]``, the number of each position's address among the distinct ones.
    """

    ids: BatchIds
    grouped: Grouped
    places: Ints

    @classmethod
    def of(cls, ids: BatchIds) -> DistinctRows:
        """Group a batch's ids."""
        grouped = group(ids)
        places = np.empty(len(ids.row_ids), np.int64)
        routing.places(places, grouped)
        return cls(ids, grouped, places)

    def sums(self, gradient: Tensor, share: float) -> Records:
        """One gradient for each distinct row, ``[U, D]``, summed in sample order and weighted."""
        gradients = self.ids.gradient_rows(gradient)
        dim = gradients.shape[1] * self.grouped.rows_per_gradient
        totals = np.empty((len(self.grouped.rows), dim), np.float32)
        updating.sum_gradients(gradients, self.grouped, share, totals)
        return totals


def table_bounds(ids: BatchIds) -> list[int]:
    """Bounds of positions for each thread to group: whole tables, about as many ids each."""
    num_ids = len(ids.row_ids)
    parts = max(min(parallel.num_threads(), num_ids // IDS_PER_THREAD), num_ids // MOST_IDS)
    if parts <= 1 or ids.shares_tables:
        return [0, num_ids]
    targets = [num_ids * part // parts for part in range(1, parts)]
    if ids.one_hot and ids.bags is None:
        inner = {-(-target // ids.num_samples) * ids.num_samples for target in targets}
    else:
        offsets, num_features = ids.bags or (ids.offsets, ids.num_features)
        begins = offsets[:: (len(offsets) - 1) // num_features]
        inner = {int(begins[place]) for place in np.searchsorted(begins, targets)}
    return [0, *sorted(inner - {0, num_ids}), num_ids]


def is_one_hot(batch: JaggedBatch) -> bool:
    """Whether every bag holds exactly one id; quick for batches with the shared offsets of such."""
    offsets = batch.offsets
    if offsets.data_ptr() == one_hot_offsets(offsets.numel() - 1).data_ptr():
        return True
    return batch.values.numel() == offsets.numel() - 1 and bool((batch.lengths() == 1).all())


@lru_cache(maxsize=64)
def one_hot_sources(num_samples: int, columns: Columns) -> NDArray[np.int32]:
    """:func:`~pibroch.kernels.gather_pool.gradient_sources` of bags with one id each; shared."""
    samples = np.arange(num_samples) * columns.rows_per_sample
    return (columns.first_rows[:, None] + samples).astype(np.int32).ravel()
