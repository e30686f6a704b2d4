"""The processes beside the trainers of a run: started with it, or met where they are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from pibroch.collectives.world import World
from pibroch.config import RunConfig
from pibroch.errors import ConfigError
from pibroch.process import threads_of_rank
from pibroch.roles import DATA_PROCESSOR, EMBEDDING_SERVER, ORACLE, Role
from pibroch.train.agreement import on_first, together
from pibroch.train.run_directory import RunDirectory


@dataclass(frozen=True, slots=True)
class Beside:
    """Who serves the trainers of a run, by names of workers of this process's RPC group.

    Attributes:
        servers: that hold rows.
        processors: that make batches.
        oracle: that plans for all ranks; each plans for itself when absent.
    """

    servers: tuple[str, ...] = ()
    processors: tuple[str, ...] = ()
    oracle: str | None = None


def wanted(config: RunConfig) -> dict[Role, int]:
    """How many processes of each role a recipe asks for; roles of which there are none are left out."""
    counts = {
        EMBEDDING_SERVER: config.embedding.servers or 0,
        ORACLE: int(config.embedding.oracle == "central"),
        DATA_PROCESSOR: config.data.processors,
    }
    return {role: count for role, count in counts.items() if count}


def meeting_places(config: RunConfig) -> dict[Role, str | None]:
    """Where processes of each role are met, as far as the recipe says that they run already."""
    return {
        EMBEDDING_SERVER: config.embedding.meet, ORACLE: config.embedding.meet, DATA_PROCESSOR: config.data.meet,
    }  # fmt: skip


@contextmanager
def processes_beside(config: RunConfig, world: World, run: RunDirectory, meet: str | None = None) -> Iterator[Beside]:
    """Within, this rank is joined with the processes that the recipe asks for. Every rank enters it.

    Args:
        config: asks for some, or for none.
        world: the ranks.
        run: keeps what the processes say that the run starts.
        meet: where a launcher's processes meet; then none are started here.

    Raises:
        ConfigError: for processes to be started by a run on several machines, or an address that cannot be used.
        TrainingError: when one does not come.
    """
    roles, channel = wanted(config), world.control
    if not roles:
        yield Beside()
        return
    from pibroch.roles.group import join, leave  # these stand on RPC, which a run in one process does without
    from pibroch.roles.process import Share, started

    places = meeting_places(config)
    own = {role: count for role, count in roles.items() if meet is None and places[role] is None}
    meet = meet or next((place for place in places.values() if place is not None), None)
    has_meeting_place = meet is None and world.is_first
    with ExitStack() as stack:
        if own:
            threads = threads_of_rank(_local_ranks(world, own) + sum(own.values()))
            shares = [Share(role, count, run.path / role.folder) for role, count in own.items()]
            where = meet
            meet = on_first(channel, lambda: stack.enter_context(started(shares, threads, where)))
        assert meet is not None, "given, or opened just now"
        found = together(channel, lambda: _names(join(meet, roles, world.ranks.rank)))[0]
        if has_meeting_place:
            stack.callback(leave)
        servers, processors, oracles = map(tuple, found)
        yield Beside(servers, processors, oracles[0] if oracles else None)
        channel.barrier()  # nobody ends a process that another one still asks
        if not has_meeting_place:  # after a failure the place may be gone, and so is this process soon
            leave()


def _names(found: dict[Role, tuple[str, ...]]) -> list[list[str]]:
    return [list(found.get(role, ())) for role in (EMBEDDING_SERVER, DATA_PROCESSOR, ORACLE)]


def _local_ranks(world: World, own: dict[Role, int]) -> int:
    size = world.ranks.world_size
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if local_ranks < size:
        commands = " and ".join(f"`pibroch {role.command}`" for role in own)
        raise ConfigError(
            f"{' and '.join(f'{count} {role.title}s' for role, count in own.items())} to be started"
            f" by a run of {size} ranks on several machines",
            "processes that all machines reach",
            f"start them by {commands} and say where they meet, or start all by --by-role",
        )
    return local_ranks
