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
        record_bytes = 4 * optimizer.record_width(layout.width)
        own_bytes = record_bytes * sum(len(piece.rows) for piece in layout.pieces[channel.ranks.rank])
        free_bytes = max(0, free_memory() // neighbours - own_bytes)  # its own rows, which are still to be made
        wanted = int(free_bytes * SHARE_OF_FREE_MEMORY) // record_bytes
    offered: list[int] = channel.gather(wanted)
    return min(int(layout.bounds[-1]), *offered)


def free_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that processes of this machine can still take, or of this container where it has a limit of its own.

    Args:
        proc: where the system says what is available; half of the memory is assumed where it says nothing.
        groups: where the limits of process groups are (version 2).
    """
    lines = (proc / "meminfo").read_text().splitlines() if (proc / "meminfo").exists() else []
    available = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    free = available[0] if available else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    limit, used = groups / "memory.max", groups / "memory.current"
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        free = min(free, max(0, int(text) - int(used.read_text())))
    return free
