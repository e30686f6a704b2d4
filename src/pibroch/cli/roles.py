"""``pibroch train --roles``: which processes a run has, who starts them and what each does."""

from __future__ import annotations

import os
from pathlib import Path

from rich.table import Table

from pibroch.config import RunConfig
from pibroch.launch.job import Restarts
from pibroch.roles import EMBEDDING_SERVER, roles


def layout(config: RunConfig, ranks: int, by_role: bool = False) -> Table:
    """A row for each role of a run.

    Args:
        config: of the run.
        ranks: that this command starts; where a launcher has started this process, its number
            counts.
        by_role: whether the launcher's processes share all roles out.

    Raises:
        ConfigError: when roles leave no process to train.
    """
    from pibroch.launch.torchrun import shared
    from pibroch.train.job import training_job

    launched = "WORLD_SIZE" in os.environ
    size = int(os.environ["WORLD_SIZE"]) if launched else ranks
    by = "trainer 0" if launched else "this command"
    starters = {role.command: by for role in roles()}
    starter = "the launcher" if launched else "this command"
    if by_role:
        job = shared(training_job(config, Path(), (), 1, Restarts()), size)
        size = job.num_ranks
        starter = f"the launcher: {_ranks(range(size))}"
        first = size
        for group in job.groups[1:]:
            starters[group.role] = f"the launcher: {_ranks(range(first, first + group.count))}"
            first += group.count
    rows = [
        ("trainer", str(size), starter, _of_trainer(config, size)),
        *_beside(config, size, starters),
    ]
    table = Table("role", "processes", "started by", "does", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    return table


def memory(config: RunConfig, ranks: int, is_kept: bool) -> str | None:
    """What the rows of a run take, in a sentence.

    ``None`` where its data are not there yet, and so not known.

    Args:
        config: of the run.
        ranks: that train.
        is_kept: whether a launcher keeps rows for processes that it starts again.
    """
    if config.data.dir is None or not Path(config.data.dir).exists():
        return None
    from pibroch.data import EncodedDataset
    from pibroch.train.optimizers import build_sparse_optimizer
    from pibroch.train.session import build_tables

    optimizer = build_sparse_optimizer(config.embedding.optimizer, config.train.average)
    tables = build_tables(config, EncodedDataset.open(config.data.dir).num_rows)
    num_rows = sum(table.num_rows for table in tables)
    num_bytes = sum(
        4 * table.num_rows * optimizer.record_width(table.dim, table.dtype) for table in tables
    )
    holders = max(
        ranks, config.embedding.exchange.for_ranks(ranks).helpers().get(EMBEDDING_SERVER.command, 0)
    )
    parts = [
        f"{num_rows:,} rows with their optimizer state: {num_bytes / 1e9:.2f} GB, over {holders}"
        " processes"
    ]
    if is_kept and config.train.cut_every_seconds != 0:
        has_caches = config.embedding.exchange.for_ranks(ranks).name == "lookahead"
        cached = " and twice what is in caches" if has_caches else ""
        parts.append(
            "as much again on this machine for cuts in memory, up to as much once more for what"
            f" changes between two{cached}; they are left out where {num_bytes / 1e9:.2f} GB are"
            " more than half of what is free then"
        )
    return "; ".join(parts)


def _ranks(ranks: range) -> str:
    return f"rank {ranks.start}" if len(ranks) == 1 else f"ranks {ranks.start}-{ranks.stop - 1}"


def _of_trainer(config: RunConfig, size: int) -> str:
    exchange = config.embedding.exchange.for_ranks(size)
    homes = "keeps all rows" if size == 1 else f"keeps its part of the rows ({exchange.placed()})"
    if EMBEDDING_SERVER.command in exchange.helpers():
        homes = "keeps the rows that it reads soon"
    return f"trains {config.model.name}, {homes}; exchange {exchange.name}"


def _beside(
    config: RunConfig, size: int, starters: dict[str, str]
) -> list[tuple[str, str, str, str]]:
    """Who is beside the trainers, started by whom where nobody is met elsewhere."""
    inside = "in each trainer" if size > 1 else "in the trainer"
    rows = []
    for role in reversed(roles()):
        if (described := role.describe(config)) is not None:
            title, duty = described
            count = role.count(config)
            place = role.rendezvous_of(config)
            by = starters[role.command] if place is None else f"pibroch {role.command}, at {place}"
            rows.append((title, str(count) if count else inside, by if count else "", duty))
    return rows
