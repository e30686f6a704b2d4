"""The processes beside the trainers of a run: started with it, or met where they are."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlparse

from pibroch.collectives.agreement import on_first, together
from pibroch.collectives.world import World
from pibroch.config import RunConfig
from pibroch.errors import ConfigError
from pibroch.launch.roles import met_at, to_start, wanted
from pibroch.process import RENDEZVOUS, threads_of_rank
from pibroch.roles import DATA_PROCESSOR, Role
from pibroch.stores import tcp_store
from pibroch.train.run_directory import RunDirectory

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Helpers:
    """Who serves the trainers of a run.

    Attributes:
        workers: names of workers of this process's RPC group, by the command that starts processes
            of their role.
    """

    workers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def processors(self) -> tuple[str, ...]:
        """Those that make batches."""
        return self.workers.get(DATA_PROCESSOR.command, ())


@contextmanager
def helper_processes(config: RunConfig, world: World, run: RunDirectory) -> Iterator[Helpers]:
    """Within, this rank is joined with the processes that the recipe asks for.

    Every rank enters it.

    Args:
        config: asks for some, or for none.
        world: the ranks.
        run: keeps what the processes say that the run starts.

    Raises:
        ConfigError: for processes to be started by a run on several machines, or an address that
            cannot be used.
        TrainingError: when one does not come.
        RuntimeError: torch's, when the rendezvous of a launcher cannot be opened.
    """
    roles = wanted(config)
    channel = world.control
    if not roles:
        yield Helpers()
        return
    from pibroch.launch.beside import started
    from pibroch.roles.group import join, leave  # with all of RPC, which nobody else needs

    rendezvous = os.environ.get(RENDEZVOUS)  # of a launcher that starts all
    own = {} if rendezvous else to_start(config)
    elsewhere = met_at(config)
    opens_rendezvous = elsewhere is None and world.is_first
    place = _opened(rendezvous) if rendezvous is not None and opens_rendezvous else None
    rendezvous = rendezvous or elsewhere
    with ExitStack() as stack:
        if own:
            threads = threads_of_rank(_local_ranks(world, own) + sum(own.values()))
            how = own, run.path, threads, rendezvous, partial(run.note_restart, from_step=None)
            rendezvous = on_first(channel, lambda: stack.enter_context(started(*how)))
        assert rendezvous is not None, "given, or opened just now"
        names_by_role = together(
            channel,
            lambda: [list(each) for each in join(rendezvous, roles, world.ranks.rank).values()],
        )[0]
        if opens_rendezvous:
            stack.callback(leave)
        yield Helpers(
            {role.command: tuple(names) for role, names in zip(roles, names_by_role, strict=True)}
        )
        channel.barrier()  # nobody ends a process that another one still asks
        if not opens_rendezvous:  # after a failure the place may be gone, and so is this one soon
            leave()
    del place


def _opened(rendezvous: str) -> TCPStore:
    url = urlparse(rendezvous)
    assert url.hostname is not None and url.port is not None, "a launcher says both"
    return tcp_store(url.hostname, url.port, is_host=True)


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
