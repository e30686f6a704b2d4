"""Numbers of whole rows for shards that hold only some columns of them.

Row-wise optimizers divide by the mean square of a row's gradient, and clipping by ``max_row_norm``
needs its norm. Each owner of a block of columns computes its part of three sums a row (g·g, g·w,
w·w); owners of the same table tell each other, and all add them in the order of the columns.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch
from numpy.typing import NDArray

from pibroch.embedding import MemoryShard, RowWiseAdagrad, RowWiseAdam, SparseOptimizer
from pibroch.embedding.rows import NO_SCALE, rising
from pibroch.exchange.layout import LaneLayout
from pibroch.exchange.messages import Messages, Values
from pibroch.kernels import scatter_update as updating
from pibroch.kernels.arrays import Records
from pibroch.kernels.scatter_update import Grouped, Hyper

Sums = NDArray[np.float64]


def needs_whole_rows(layout: LaneLayout, optimizer: SparseOptimizer) -> bool:
    """Whether updates of a lane depend on columns that lie elsewhere; the same on all ranks."""
    couples = (
        isinstance(optimizer, RowWiseAdagrad | RowWiseAdam) or optimizer.max_row_norm is not None
    )
    return couples and any(
        len(piece.columns) < piece.table.dim for held in layout.pieces for piece in held
    )


def with_whole_rows(
    layout: LaneLayout,
    rank: int,
    shard: MemoryShard,
    updates: Grouped,
    gradients: Records,
    hyper: Hyper,
) -> Messages[tuple[Grouped, Records, Hyper]]:
    """Gradients combined and clipped by whole rows, with mean squares for row-wise optimizers.

    Args:
        layout: of the lane.
        rank: this one.
        shard: this rank's.
        updates: its rows that are updated.
        gradients: float32 ``[positions, D]``.
        hyper: of this step.

    Returns:
        ``updates``, ``gradients`` and ``hyper`` for :func:`pibroch.embedding.rows.update_rows`.
    """
    num_rows = len(updates.rows)
    totals = np.empty((num_rows, layout.width), np.float32)
    updating.sum_gradients(gradients, updates, 1.0, totals)
    if hyper.max_element:
        np.clip(totals, -hyper.max_element, hyper.max_element, out=totals)
    weights = shard.array("")[updates.rows]
    pairs = ((totals, totals), (totals, weights), (weights, weights))
    parts = np.stack([np.einsum("ud,ud->u", a, b, dtype=np.float64) for a, b in pairs], axis=1)
    sums, dims = yield from _over_columns(layout, rank, shard, updates, parts)
    clip = np.ones(num_rows)
    decay = hyper.weight_decay
    if hyper.max_norm:
        clip = np.minimum(1.0, hyper.max_norm / np.maximum(np.sqrt(sums[:, 0]), 1e-300))
        totals *= clip[:, None].astype(np.float32)
    squares = clip**2 * sums[:, 0] + 2 * clip * decay * sums[:, 1] + decay**2 * sums[:, 2]
    mean_squares = (squares / dims).astype(np.float32)
    single = rising(num_rows + 1)
    grouped = Grouped(updates.rows, single, single[:-1], single[:-1], NO_SCALE, mean_squares)
    return grouped, totals, hyper._replace(max_norm=0.0, max_element=0.0)


def _over_columns(
    layout: LaneLayout, rank: int, shard: MemoryShard, updates: Grouped, parts: Sums
) -> Messages[tuple[Sums, NDArray[np.int64]]]:
    """The sums ``[U, 3]`` over all columns of each row, and the dim of each row's table."""
    pieces = layout.pieces
    first_rows = [shard.first_row(i) for i in range(len(shard.pieces))]
    bounds = np.searchsorted(updates.rows, [*first_rows, len(shard.records)]).tolist()
    spans = {piece: slice(bounds[i], bounds[i + 1]) for i, piece in enumerate(shard.pieces)}
    num_touched = {piece.table.name: span.stop - span.start for piece, span in spans.items()}
    tables = [{piece.table.name for piece in held} for held in pieces]
    for_others = [
        [piece for piece in shard.pieces if p != rank and piece.table.name in t]
        for p, t in enumerate(tables)
    ]
    from_others = [
        [piece for piece in held if p != rank and piece.table.name in tables[rank]]
        for p, held in enumerate(pieces)
    ]
    sent = np.concatenate(
        [parts[:0], *(parts[spans[piece]] for to_one in for_others for piece in to_one)]
    )
    answer = yield Values(
        torch.from_numpy(sent),
        [sum(num_touched[piece.table.name] for piece in to_one) for to_one in for_others],
        [sum(num_touched[piece.table.name] for piece in from_one) for from_one in from_others],
    )
    # by table and first column
    blocks_by_table: dict[str, dict[int, Sums]] = defaultdict(dict)
    for piece, span in spans.items():
        blocks_by_table[piece.table.name][piece.columns.start] = parts[span]
    sizes = [num_touched[piece.table.name] for from_one in from_others for piece in from_one]
    for piece, sums in zip(
        (p for from_one in from_others for p in from_one), answer.tensor.split(sizes), strict=True
    ):
        blocks_by_table[piece.table.name][piece.columns.start] = sums.numpy()
    whole = {
        name: sum(blocks[first] for first in sorted(blocks))
        for name, blocks in blocks_by_table.items()
    }
    dims = [np.full(span.stop - span.start, piece.table.dim) for piece, span in spans.items()]
    all_sums = [np.asarray(whole[piece.table.name]) for piece in spans]
    return np.concatenate([parts[:0], *all_sums]), np.concatenate([np.empty(0, np.int64), *dims])
