"""A minibatch's ids on their way through a lookup, and how they are grouped by row for the update."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pibroch.data import JaggedBatch
from pibroch.data.batch import one_hot_offsets
from pibroch.embedding.rows import NO_SCALE, rising
from pibroch.kernels import parallel
from pibroch.kernels.dedupe import numba as grouping
from pibroch.kernels.gather_pool import numba as pooling
from pibroch.kernels.scatter_update.numba import Grouped

IDS_PER_THREAD = 4096  # ids below which a further thread is not worth waking to group them


@dataclass(frozen=True, slots=True)
class BatchIds:
    """The ids of a batch as rows; shapes as in :mod:`pibroch.kernels.gather_pool.numba`.

    Attributes:
        row_ids: int64 ``[V]``; between ranks, addresses.
        offsets: int64 ``[F * B + 1]``.
        scale: float32 ``[V]``, factor of each id in its bag's sum, or empty when all are 1.
        one_hot: whether each bag holds exactly one id.
        num_features: F.
        shares_tables: whether some table is read by several features.
    """

    row_ids: NDArray[np.int64]
    offsets: NDArray[np.int64]
    scale: NDArray[np.float32]
    one_hot: bool
    num_features: int
    shares_tables: bool

    @property
    def num_samples(self) -> int:
        """B."""
        return (len(self.offsets) - 1) // self.num_features


def pooling_scale(batch: JaggedBatch, mean_of_feature: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Factor of each id in its bag's sum, or empty when all are 1."""
    if batch.weights is None and not mean_of_feature.any():
        return NO_SCALE
    weights = NO_SCALE if batch.weights is None else batch.weights.detach().contiguous().float().numpy()
    scale = np.empty(batch.values.numel(), np.float32)
    pooling.pooling_scale(batch.offsets.numpy(), weights, mean_of_feature, scale)
    return scale


def group(ids: BatchIds, bounds: list[int] | None = None) -> Grouped:
    """Group a batch's positions by row, each row's in sample order; rows rise within each of the ``bounds``.

    Args:
        ids: of the batch.
        bounds: of positions for each thread, which may share no row; one range when absent, so that all rows rise.
    """
    num_ids = len(ids.row_ids)
    bounds = [0, num_ids] if bounds is None else bounds
    if ids.shares_tables:
        sequence = np.empty(num_ids, np.int32)
        grouping.sample_major_sequence(ids.offsets, ids.num_features, sequence)
    else:
        sequence = rising(num_ids)
    rows, order, segments = np.empty(num_ids, np.int64), np.empty(num_ids, np.int32), np.empty(num_ids + 1, np.int32)
    counts = parallel.run_ranges(grouping.dedupe, bounds, ids.row_ids, sequence, rows, segments, order)
    num_rows = 0
    for start, count in zip(bounds, counts, strict=False):
        for found in (rows, segments):
            found[num_rows : num_rows + count] = found[start : start + count]
        num_rows += count
    segments[num_rows] = num_ids
    if ids.one_hot:
        source = one_hot_sources(num_ids, ids.num_features)
    else:
        source = np.empty(num_ids, np.int32)
        pooling.gradient_sources(ids.offsets, ids.num_features, source)
    return Grouped(rows[:num_rows], segments[: num_rows + 1], order, source, ids.scale)


def table_bounds(ids: BatchIds) -> list[int]:
    """Bounds of positions for each thread to group: whole tables, about as many ids each."""
    num_ids = len(ids.row_ids)
    parts = 1 if ids.shares_tables else max(1, min(parallel.num_threads(), num_ids // IDS_PER_THREAD))
    if parts == 1:
        return [0, num_ids]
    targets = [num_ids * part // parts for part in range(1, parts)]
    if ids.one_hot:
        inner = {-(-target // ids.num_samples) * ids.num_samples for target in targets}
    else:
        begins = ids.offsets[:: ids.num_samples]
        inner = {int(begins[place]) for place in np.searchsorted(begins, targets)}
    return [0, *sorted(inner - {0, num_ids}), num_ids]


def is_one_hot(batch: JaggedBatch) -> bool:
    """Whether every bag holds exactly one id; at once for batches whose offsets are the shared ones of such batches."""
    offsets = batch.offsets
    if offsets.data_ptr() == one_hot_offsets(offsets.numel() - 1).data_ptr():
        return True
    return batch.values.numel() == offsets.numel() - 1 and bool((batch.lengths() == 1).all())


@lru_cache(maxsize=16)
def one_hot_sources(num_ids: int, num_features: int) -> NDArray[np.int32]:
    """:func:`~pibroch.kernels.gather_pool.numba.gradient_sources` of bags with one id each; shared."""
    return np.ascontiguousarray(np.arange(num_ids, dtype=np.int32).reshape(-1, num_features).T).ravel()
