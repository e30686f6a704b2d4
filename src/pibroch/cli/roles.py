"""``pibroch train --roles``: which processes a run has, who starts them and what each does."""

from __future__ import annotations

import os

from rich.table import Table

from pibroch.config import RunConfig


def layout(config: RunConfig, ranks: int) -> Table:
    """A row for each role of a run.

    Args:
        config: of the run.
        ranks: that this command starts; where a launcher has started this process, its number counts.
    """
    launched = "WORLD_SIZE" in os.environ
    size = int(os.environ["WORLD_SIZE"]) if launched else ranks
    starter = "the launcher" if launched else "this command"
    rows = [
        ("trainer", str(size), starter, _of_trainer(config, size)),
        *_beside(config, size, "trainer 0" if launched else starter),
    ]
    table = Table("role", "processes", "started by", "does", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    return table


def _of_trainer(config: RunConfig, size: int) -> str:
    embedding = config.embedding
    exchange = embedding.exchange if embedding.exchange != "auto" else "local" if size == 1 else "alltoall"
    placement = embedding.plan or embedding.placement
    homes = "keeps all rows" if size == 1 else f"keeps its part of the rows ({placement})"
    if embedding.servers is not None:
        homes = "keeps the rows that it reads soon"
    return f"trains {config.model.name}, {homes}; exchange {exchange}"


def _beside(config: RunConfig, size: int, starter: str) -> list[tuple[str, str, str, str]]:
    embedding, inside = config.embedding, "in each trainer" if size > 1 else "in the trainer"
    rows = [("data", inside, "", "reads and shuffles the trainer's part of each batch")]
    if embedding.exchange == "lookahead":
        length = "as far as the cache holds" if embedding.lookahead is None else f"{embedding.lookahead} steps"
        rows.append(
            ("oracle", inside, "", f"plans what travels, {length} ahead; all plan the same, so no plan is sent")
        )
    if embedding.servers is not None:
        by = starter if embedding.meet is None else f"pibroch embedding-server, at {embedding.meet}"
        rows.append(
            (
                "embedding server",
                str(embedding.servers),
                by,
                f"keeps the records of its part of the rows ({embedding.placement})",
            )
        )
    return rows
