"""How many rows of other ranks' or servers' homes a rank can keep."""

from __future__ import annotations

import os
from pathlib import Path

from pibroch.collectives import Channel
from pibroch.embedding import SparseOptimizer
from pibroch.errors import ConfigError
from pibroch.exchange.layout import LaneLayout

SHARE_OF_FREE_MEMORY = 0.5


def check_whole_rows(layout: LaneLayout) -> None:
    """Raise ConfigError where rows are cut into columns, copied, or pooled by their owners."""
    whole = all(len(piece.columns) == piece.table.dim for held in layout.pieces for piece in held)
    if layout.is_pooled or layout.num_replicated or not whole:
        raise ConfigError(
            "a placement that cuts, copies or pools rows", "row_wise or table_wise for exchange='lookahead'",
            "leave placement out",
        )  # fmt: skip


def spare_rows(layout: LaneLayout, optimizer: SparseOptimizer, wanted: int | None, channel: Channel) -> int:
    """The cache's slots, the same number on all ranks; every rank calls it.

    Args:
        layout: of the rows.
        optimizer: whose state the records have.
        wanted: by the user; ``None`` for as many as fit.
        channel: to the other ranks.
    """
    if wanted is not None and wanted < 0:
        raise ConfigError(f"cache_rows {wanted}", "at least 0")
    if len(layout.pieces) == 1:  # all rows are at home
        return 0
    if wanted is None:
        neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", channel.ranks.world_size))
        bytes_here = int(free_memory() * SHARE_OF_FREE_MEMORY) // neighbours
        wanted = bytes_here // (4 * optimizer.record_width(layout.width))
    offered: list[int] = channel.gather(wanted)
    return min(int(layout.bounds[-1]), *offered)


def free_memory() -> int:
    """Bytes that processes of this machine can still take."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
