"""The ranks of a run, a channel to agree on things, and the detector of failures."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from pibroch.collectives.failure_detector import FailureDetector, OnStuck
from pibroch.collectives.ranks import Channel, Ranks
from pibroch.errors import ConfigError, PibrochError, TrainingError
from pibroch.host import is_one_machine
from pibroch.stores import tcp_store

if TYPE_CHECKING:
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

RENDEZVOUS_TIMEOUT_S = 120.0
CONTROL_TIMEOUT_S = 3600.0
"""Waits that are no part of a step: for rank 0 to generate data, for all to save.

Ranks that die are noticed all the same.
"""


@dataclass(frozen=True, slots=True)
class World:
    """The ranks of a run.

    Attributes:
        ranks: who they are; open further channels from it.
        control: a channel of the training thread for small messages, on which a rank may be late by
            an hour.
        detector: over all of them; ``None`` for one process.
    """

    ranks: Ranks
    control: Channel
    detector: FailureDetector | None = None

    @classmethod
    def alone(cls) -> World:
        """One process."""
        ranks = Ranks.alone()
        return cls(ranks, ranks.open_channel())

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which speaks for all."""
        return self.ranks.rank == 0

    def enter(self, step: int) -> None:
        """Let the others know in which step this rank is."""
        if self.detector is not None:
            self.detector.enter(step)


@contextmanager
def world_of_environment(on_stuck: OnStuck | None = None) -> Iterator[World]:
    """The processes that the environment names, joined over gloo.

    Its variables are ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``.

    torchrun sets these variables; without them there is one process. Leaving waits for all ranks.
    When one of them fails, all others leave with RankFailedError; the process group is then left as
    it is: threads may hang in it, so the process should end without waiting for them (`os._exit`).

    Args:
        on_stuck: ends the process when another rank failed and this one does not come back, see
            :class:`FailureDetector`.

    Raises:
        ConfigError: when the variables make no sense.
        TrainingError: when the ranks do not find each other.
        RankFailedError: inside and when leaving.
    """
    rank = _number("RANK", 0)
    size = _number("WORLD_SIZE", 1)
    if not 0 <= rank < size:
        raise ConfigError(
            f"RANK {rank} and WORLD_SIZE {size}", "a rank from 0 to WORLD_SIZE - 1", "use torchrun"
        )
    if size == 1:
        yield World.alone()
        return
    world, detector = _join(rank, size, on_stuck)
    try:
        yield world
        world.control.barrier()
    except BaseException as error:
        cause = detector.report(error)
        if cause is not None:
            raise cause from error
        raise
    finally:
        detector.close()
    dist.destroy_process_group()


def _join(rank: int, size: int, on_stuck: OnStuck | None) -> tuple[World, FailureDetector]:
    try:
        timeout = timedelta(seconds=RENDEZVOUS_TIMEOUT_S)
        _keep_gloo_to_loopback()
        dist.init_process_group(
            "gloo", store=_store(rank, timeout), rank=rank, world_size=size, timeout=timeout
        )
        ranks = Ranks.joined()
        control = ranks.patient(CONTROL_TIMEOUT_S).open_channel()
        detector = FailureDetector.over(control, on_stuck)
    except PibrochError:
        raise
    # what torch.distributed raises, and sockets
    except (RuntimeError, ValueError, OSError) as error:
        where = ":".join(
            os.environ.get(variable, f"(no {variable})")
            for variable in ("MASTER_ADDR", "MASTER_PORT")
        )
        raise TrainingError(
            f"no meeting of {size} ranks at {where}: {error}",
            "all ranks started, each reaching that address",
            "check MASTER_ADDR, MASTER_PORT and the logs of all ranks",
        ) from error
    ranks.explain = detector.explain
    return World(ranks, control, detector), detector


def _store(rank: int, timeout: timedelta) -> PrefixStore:
    """The store that rank 0 opens, or this start's part of torchrun's.

    With `--max-restarts` torchrun's outlives them, and torch (2.13) would find in it where those
    before listened. Agents that share no store count restarts each for itself.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # not in every build of torch

    host = os.environ.get("MASTER_ADDR")
    if host is None or "MASTER_PORT" not in os.environ:
        raise ValueError("ranks meet where MASTER_ADDR and MASTER_PORT say")
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_torchruns else "0"
    opens = rank == 0 and not is_torchruns
    store = tcp_store(host, _number("MASTER_PORT", 0), is_host=opens, timeout=timeout)
    return PrefixStore(f"pibroch_{attempt}", store)


def _keep_gloo_to_loopback() -> None:
    """Use loopback where all ranks are on this machine and nothing else was chosen.

    Gloo would listen where the machine's name leads.
    """
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if is_one_machine() and loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, str(default))
    if not text.isdecimal():
        raise ConfigError(
            f"{variable}={text} in the environment",
            "a number",
            "start ranks with --ranks or torchrun",
        )
    return int(text)
