"""How many rows of other ranks' or servers' homes a rank can keep."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from pibroch.collectives import Channel
from pibroch.embedding import SparseOptimizer
from pibroch.errors import ConfigError
from pibroch.exchange.layout import LaneLayout
from pibroch.observability.memory import free_memory

SHARE_OF_FREE_MEMORY = 0.5


def check_whole_rows(layout: LaneLayout) -> None:
    """Refuse a layout whose rows are cut into columns, copied, or pooled by their owners.

    Raises:
        ConfigError: for such a layout.
    """
    whole = all(len(piece.columns) == piece.table.dim for held in layout.pieces for piece in held)
    if layout.owners_pool or layout.num_replicated or not whole:
        raise ConfigError(
            "a placement that cuts, copies or pools rows",
            "row_wise or table_wise for exchange='lookahead'",
            "leave placement out; with a plan of rows, make it by --policy none: rows borrowed"
            " ahead of time do what copies would",
        )


def spare_rows(
    layouts: Sequence[LaneLayout],
    optimizers: Sequence[SparseOptimizer],
    cache_rows: int | None,
    channel: Channel,
) -> list[int]:
    """The slots of each lane's cache, the same numbers on all ranks; every rank calls it.

    Args:
        layouts: of the lanes.
        optimizers: whose state the records of each lane have.
        cache_rows: slots of each lane that the user asks for; ``None`` for as many as fit, lanes
            sharing the memory by the bytes of their rows.
        channel: to the other ranks.
    """
    if cache_rows is not None and cache_rows < 0:
        raise ConfigError(f"cache_rows {cache_rows}", "at least 0")
    if len(layouts[0].pieces) == 1:  # all rows are at home
        return [0] * len(layouts)
    offers = [cache_rows] * len(layouts)
    if cache_rows is None:
        rank = channel.ranks.rank
        neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", channel.ranks.world_size))
        widths = [
            4 * o.record_width(layout.width, layout.dtype)
            for o, layout in zip(optimizers, layouts, strict=True)
        ]
        homes = [sum(len(piece.rows) for piece in layout.pieces[rank]) for layout in layouts]
        own_bytes = sum(width * count for width, count in zip(widths, homes, strict=True))
        # this rank's own rows are still to be made
        free_bytes = max(0, free_memory() // neighbours - own_bytes)
        whole = [
            width * int(layout.bounds[-1]) for width, layout in zip(widths, layouts, strict=True)
        ]
        room = int(free_bytes * SHARE_OF_FREE_MEMORY)
        offers = [
            room * each // sum(whole) // width for each, width in zip(whole, widths, strict=True)
        ]
    offered: list[list[int]] = channel.gather(offers)
    least = np.min(offered, axis=0).tolist()
    return [min(int(layout.bounds[-1]), each) for layout, each in zip(layouts, least, strict=True)]
