"""Servers alone, for programs of one's own: where they and trainers meet. `pibroch train` goes by :mod:`pibroch.roles`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pibroch.roles import EMBEDDING_SERVER, group, process
from pibroch.roles.group import JOIN_TIMEOUT_S, leave
from pibroch.servers import server

__all__ = ["join", "leave", "serve", "started"]


def serve(meet: str, number: int, opens: bool | None = None) -> None:
    """Be server ``number``, beside what else this process does, until :func:`leave`.

    Args:
        meet: ``tcp://host:port``; the others reach ``host``, and it is this machine's where the meeting place is opened.
        number: from 0.
        opens: whether this process opens the meeting place; server 0 does, when absent.

    Raises:
        ConfigError: for an address that cannot be used, or no secret where one is needed.
        TrainingError: when server 0 does not come.
    """
    opens = number == 0 if opens is None else opens
    group.serve(EMBEDDING_SERVER, meet, number, opens, server.SERVER.on_lost)


def join(meet: str, num_servers: int, rank: int, timeout_s: float = JOIN_TIMEOUT_S) -> tuple[str, ...]:
    """Be a trainer, until :func:`leave`. Blocks until all servers are there; returns their names.

    Args:
        meet: as the servers got it.
        num_servers: how many there are.
        rank: of this trainer.
        timeout_s: for all of them to come.

    Raises:
        ConfigError: for an address that cannot be used, or no secret where one is needed.
        TrainingError: when a server does not come in time.
    """
    return group.join(meet, {EMBEDDING_SERVER: num_servers}, rank, timeout_s)[EMBEDDING_SERVER]


@contextmanager
def started(num_servers: int, logs: Path, threads: int) -> Iterator[str]:
    """Within, servers run on this machine; gives their meeting place. They end with this process, however it ends.

    Args:
        num_servers: how many.
        logs: folder for what they say.
        threads: of each one's kernels.

    Raises:
        TrainingError: when one does not start.
    """
    with process.started([process.Share(EMBEDDING_SERVER, num_servers, logs)], threads) as meet:
        yield meet
