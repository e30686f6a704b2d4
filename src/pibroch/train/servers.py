"""The embedding servers of a run: started with it, or met where they are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pibroch.collectives.team import Team
from pibroch.config.embedding import EmbeddingConfig
from pibroch.errors import ConfigError
from pibroch.process import threads_of_rank
from pibroch.servers.group import join, leave
from pibroch.servers.process import started
from pibroch.train.agreement import on_first, together


@contextmanager
def embedding_servers(config: EmbeddingConfig, team: Team, logs: Path) -> Iterator[tuple[str, ...]]:
    """Within, this rank is joined with the servers that the recipe asks for; gives their names. Every rank enters it.

    Args:
        config: asks for servers, or for none.
        team: the ranks.
        logs: folder for what servers of this run say.

    Raises:
        ConfigError: for servers to be started by a run on several machines, or an address that cannot be used.
        TrainingError: when a server does not come.
    """
    if config.servers is None:
        yield ()
        return
    num_servers, meet, channel = config.servers, config.meet, team.control
    with ExitStack() as stack:
        if meet is None:
            local_ranks = _local_ranks(team)
            threads = threads_of_rank(local_ranks + num_servers)
            meet = on_first(channel, lambda: stack.enter_context(started(num_servers, logs, threads)))
        names = together(channel, lambda: list(join(meet, num_servers, team.ranks.rank)))[0]
        has_meeting_place = config.meet is None and team.is_first
        if has_meeting_place:
            stack.callback(leave)
        yield tuple(names)
        channel.barrier()  # nobody ends a server that another one still asks
        if not has_meeting_place:  # after a failure the place may be gone, and so is this process soon
            leave()


def _local_ranks(team: Team) -> int:
    size = team.ranks.world_size
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if local_ranks < size:
        raise ConfigError(
            f"embedding.servers without embedding.meet, for {size} ranks on several machines",
            "servers that all machines reach",
            "start them by `pibroch embedding-server`, and set embedding.meet",
        )
    return local_ranks
