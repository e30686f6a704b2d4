"""``pibroch train --roles``: which processes a run has, who starts them and what each does."""

from __future__ import annotations

import os

from rich.table import Table

from pibroch.cli.by_role import split_of
from pibroch.config import RunConfig
from pibroch.roles import DATA_PROCESSOR, EMBEDDING_SERVER, ROLES, Role


def layout(config: RunConfig, ranks: int, by_role: bool = False) -> Table:
    """A row for each role of a run.

    Args:
        config: of the run.
        ranks: that this command starts; where a launcher has started this process, its number counts.
        by_role: whether the launcher's processes share all roles out.

    Raises:
        ConfigError: when roles leave no process to train.
    """
    launched = "WORLD_SIZE" in os.environ
    size = int(os.environ["WORLD_SIZE"]) if launched else ranks
    starters = dict.fromkeys(ROLES, "trainer 0" if launched else "this command")
    starter = "the launcher" if launched else "this command"
    if by_role:
        split = split_of(config, size)
        size = split.num_trainers
        starter = f"the launcher: {_ranks(range(size))}"
        starters = {role: f"the launcher: {_ranks(split.ranks(role))}" for role in ROLES}
    rows = [("trainer", str(size), starter, _of_trainer(config, size)), *_beside(config, size, starters)]
    table = Table("role", "processes", "started by", "does", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    return table


def _ranks(ranks: range) -> str:
    return f"rank {ranks.start}" if len(ranks) == 1 else f"ranks {ranks.start}-{ranks.stop - 1}"


def _of_trainer(config: RunConfig, size: int) -> str:
    exchange = config.embedding.exchange.for_ranks(size)
    homes = "keeps all rows" if size == 1 else f"keeps its part of the rows ({exchange.placed()})"
    if EMBEDDING_SERVER.command in exchange.helpers():
        homes = "keeps the rows that it reads soon"
    return f"trains {config.model.name}, {homes}; exchange {exchange.name}"


def _beside(config: RunConfig, size: int, starters: dict[Role, str]) -> list[tuple[str, str, str, str]]:
    """Who is beside the trainers, started by whom where nobody is met elsewhere."""
    data, exchange = config.data, config.embedding.exchange
    inside = "in each trainer" if size > 1 else "in the trainer"
    if data.processors:
        by = _starter(DATA_PROCESSOR, starters, data.meet)
        rows = [("data processor", str(data.processors), by, "reads, shuffles and collates batches for all trainers")]
    else:
        rows = [("data", inside, "", "reads and shuffles the trainer's part of each batch")]
    roles, counts = {role.command: role for role in ROLES}, exchange.helpers()
    for command, duty in exchange.duties().items():
        role = roles[command]
        if command in counts:
            rows.append((role.title, str(counts[command]), _starter(role, starters, exchange.rendezvous()), duty))
        else:
            rows.append((role.title, inside, "", duty))
    return rows


def _starter(role: Role, starters: dict[Role, str], meet: str | None) -> str:
    return starters[role] if meet is None else f"pibroch {role.command}, at {meet}"
