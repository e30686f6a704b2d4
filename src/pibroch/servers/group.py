"""Servers alone, for programs of one's own: where they and trainers meet.

`pibroch train` goes by :mod:`pibroch.roles`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from pibroch.launch import beside
from pibroch.roles import EMBEDDING_SERVER, ORACLE, group
from pibroch.roles.group import JOIN_TIMEOUT_S
from pibroch.servers import plan_service, server

ORACLE_NAME = ORACLE.name(0)
"""The worker that a central oracle is."""


def serve(rendezvous: str, number: int, opens: bool | None = None) -> None:
    """Be server ``number``, beside what else this process does, until :func:`leave`.

    Args:
        rendezvous: ``tcp://host:port``; the others reach ``host``, and it is this machine's where
            the rendezvous is opened.
        number: from 0.
        opens: whether this process opens the rendezvous; server 0 does, when absent.

    Raises:
        ConfigError: for an address that cannot be used, or no secret where one is needed.
        TrainingError: when server 0 does not come.
    """
    opens = number == 0 if opens is None else opens
    group.serve(EMBEDDING_SERVER, rendezvous, number, opens, server.SHARDS.on_lost)


def serve_plans(rendezvous: str, number: int = 0, opens: bool = True) -> None:
    """Be the central oracle, beside what else this process does, until :func:`leave`.

    With embedding servers, server 0 opens the rendezvous. Otherwise as :func:`serve`.
    """
    group.serve(ORACLE, rendezvous, number, opens, plan_service.ORACLES.on_lost)


def join(
    rendezvous: str,
    num_servers: int,
    rank: int,
    timeout_s: float = JOIN_TIMEOUT_S,
    with_oracle: bool = False,
) -> tuple[str, ...]:
    """Be a trainer, until :func:`leave`. Blocks until all servers are there; returns their names.

    Args:
        rendezvous: as the servers got it.
        num_servers: how many there are.
        rank: of this trainer.
        timeout_s: for all of them to come.
        with_oracle: whether there is a central oracle too, whose name is ``ORACLE_NAME``.

    Raises:
        ConfigError: for an address that cannot be used, or no secret where one is needed.
        TrainingError: when a server or the oracle does not come in time.
    """
    return group.join(
        rendezvous, {EMBEDDING_SERVER: num_servers, ORACLE: int(with_oracle)}, rank, timeout_s
    )[EMBEDDING_SERVER]


def started(
    num_servers: int, logs: Path, threads: int, with_oracle: bool = False
) -> AbstractContextManager[str]:
    """Within, servers run on this machine; gives their rendezvous.

    They end with this process, however it ends.

    Args:
        num_servers: how many.
        logs: folder for what they say, with one for each role.
        threads: of each one's kernels.
        with_oracle: whether a central oracle runs, too.
    """
    counts = {EMBEDDING_SERVER: num_servers, ORACLE: int(with_oracle)}
    return beside.started(counts, logs, threads)
