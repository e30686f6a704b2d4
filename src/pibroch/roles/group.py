"""Where the processes of a run meet.

One RPC group whose members come and go, at an address that all reach.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from operator import attrgetter
from typing import Any
from urllib.parse import urlparse

import msgspec
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pibroch import rpc
from pibroch.errors import ConfigError, TrainingError
from pibroch.roles.role import FIRST_TRAINER_ID, LARGEST_NUMBER, Role
from pibroch.rpc.calls.agent import current_agent
from pibroch.rpc.info import WorkerInfo
from pibroch.rpc.transport.membership import Record, is_listening
from pibroch.stores import tcp_store

JOIN_TIMEOUT_S = 120.0
SAY_TIMEOUT_S = 5.0
"""Seconds to reach a rendezvous that may have ended with its run.

It is told there that a process has ended, too.
"""
_POLL_S = 0.05
TLS_VARIABLE = "PIBROCH_SERVERS_TLS"


def serve(
    role: Role,
    rendezvous: str,
    number: int,
    opens: bool,
    on_lost: Callable[[WorkerInfo, int], None] | None = None,
) -> None:
    """Be number ``number`` of a role, beside what else this process does, until :func:`leave`.

    Args:
        role: whose functions trainers may call here.
        rendezvous: ``tcp://host:port``; the others reach ``host``, and it is this machine's where
            the rendezvous is opened.
        number: from 0.
        opens: whether this process opens the rendezvous.
        on_lost: called with a worker and its incarnation when it is gone, on a thread that may
            wait.

    Raises:
        ConfigError: for an address that cannot be used, or no secret where one is needed.
        TrainingError: when nobody opens the rendezvous.
    """
    if not 0 <= number < LARGEST_NUMBER:
        raise ConfigError(
            f"{role.title} {number}", "a number from 0", f"number the {role.title}s 0, 1, 2, ..."
        )
    store = _store(rendezvous, opens, role, number)
    options = _options(store, [role.functions])
    rpc.init_rpc(role.name(number), rank=role.first_id + number, rpc_backend_options=options)
    agent = current_agent()
    if on_lost is not None:
        agent.when_lost(
            lambda worker, incarnation: agent.submit(lambda: on_lost(worker, incarnation))
        )
    key = _ready(role, number)
    store.set(_gone(role, number), "")
    store.set(key, msgspec.json.encode(agent.record).decode())
    agent.when_closed(lambda: _cross_out(store, key))


def serve_as(role: Role, rendezvous: str, number: int, opens: bool, **options: Any) -> None:
    """As :func:`serve`, in the way that the role has for it, with its own options."""
    if role.serving is None:
        serve(role, rendezvous, number, opens, **options)
        return
    module, _, function = role.serving.partition(":")
    attrgetter(function)(import_module(module))(rendezvous, number, opens=opens, **options)


def join(
    rendezvous: str, wanted: Mapping[Role, int], rank: int, timeout_s: float = JOIN_TIMEOUT_S
) -> dict[Role, tuple[str, ...]]:
    """Be a trainer, until :func:`leave`.

    Blocks until all that are wanted are there; returns their names.

    Args:
        rendezvous: as the others got it.
        wanted: how many of each role there are; one at least.
        rank: of this trainer.
        timeout_s: for all of them to come.

    Raises:
        ConfigError: for an address that cannot be used, or no secret where one is needed.
        TrainingError: when one does not come in time, or has ended and is not started again.
    """
    members = [(role, number) for role, count in wanted.items() for number in range(count)]
    store = _store(rendezvous, False, *members[0], timeout_s)
    deadline = time.monotonic() + timeout_s
    for role, number in members:
        try:
            # A wait inside the store would hear no signal. Who was killed has not crossed itself
            # out, and a successor may be on its way.
            while not (
                (entry := _entry(store, _ready(role, number)))
                and is_listening(msgspec.json.decode(entry, type=Record))
            ):
                if reason := _entry(store, _gone(role, number)):
                    raise lost(role, number, reason.decode())
                if time.monotonic() > deadline:
                    raise _absent(role, number, rendezvous, timeout_s)
                time.sleep(_POLL_S)
        except (dist.DistError, RuntimeError) as error:
            raise _absent(role, number, rendezvous, timeout_s) from error
    rpc.init_rpc(
        f"trainer{rank}", rank=FIRST_TRAINER_ID + rank, rpc_backend_options=_options(store, [])
    )
    return {role: tuple(map(role.name, range(count))) for role, count in wanted.items()}


def say_lost(rendezvous: str, role: Role, number: int, reason: str) -> None:
    """Let trainers that still wait for a process know that it has ended, and is not started again.

    Raises:
        TrainingError: when the rendezvous cannot be reached.
        RuntimeError: torch's, when it ends meanwhile.
    """
    _store(rendezvous, False, role, number, SAY_TIMEOUT_S).set(_gone(role, number), reason)


def lost(role: Role, number: int, reason: str) -> TrainingError:
    """The error for a process that has ended before its time; started again, the run may go on."""
    error = TrainingError(
        f"{role.title} {number}, which {reason}",
        f"all {role.title}s",
        "see its log; a training run goes on with --resume",
    )
    error.is_loss = True
    return error


def leave() -> None:
    """Leave the group, without waiting for anything."""
    rpc.shutdown(graceful=False)


def tls_of(environ: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Paths of certificate, key and authorities from ``PIBROCH_SERVERS_TLS``.

    Commas stand between them.

    Raises:
        ConfigError: when they are not three.
    """
    text = environ.get(TLS_VARIABLE)
    if not text:
        return None
    paths = text.split(",")
    if len(paths) != 3:
        raise ConfigError(
            f"{TLS_VARIABLE}={text}", "CERTIFICATE,KEY,AUTHORITIES: three paths of PEM files"
        )
    return paths[0], paths[1], paths[2]


def _ready(role: Role, number: int) -> str:
    return f"ready/{role.name(number)}"


def _gone(role: Role, number: int) -> str:
    return f"gone/{role.name(number)}"


def _entry(store: TCPStore, key: str) -> bytes:
    """What was said under a key; nothing where nobody has."""
    return store.get(key) if store.check([key]) else b""


def _cross_out(store: TCPStore, key: str) -> None:
    # whoever opened the rendezvous may be gone already
    with suppress(dist.DistError, RuntimeError):
        store.set(key, "")


def _options(store: TCPStore, served: list[str]) -> rpc.RpcBackendOptions:
    return rpc.RpcBackendOptions(store=store, tls=tls_of(os.environ), allowed_modules=served)


def _store(
    rendezvous: str, is_host: bool, role: Role, number: int, timeout_s: float = JOIN_TIMEOUT_S
) -> TCPStore:
    """The rendezvous; ``role`` and ``number`` are who opens it, or who is looked for first."""
    url = urlparse(rendezvous)
    host = url.hostname
    port = None
    with suppress(ValueError):  # of what is no number
        port = url.port
    if url.scheme != "tcp" or not host or not port:
        raise ConfigError(f"rendezvous {rendezvous!r}", "tcp://HOST:PORT")
    try:
        return tcp_store(host, port, is_host=is_host, timeout=timedelta(seconds=timeout_s))
    except (dist.DistError, RuntimeError) as error:
        if is_host:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"{rendezvous}, where {role.title} {number} cannot listen ({reason})",
                "a free port of this machine",
            ) from error
        raise _absent(role, 0, rendezvous, timeout_s) from error


def _absent(role: Role, number: int, rendezvous: str, timeout_s: float) -> TrainingError:
    return TrainingError(
        f"no {role.title} {number} at {rendezvous} within {timeout_s:g} s",
        f"all {role.title}s",
        f"start it: pibroch {role.command} --rendezvous {rendezvous} --number {number}",
    )
