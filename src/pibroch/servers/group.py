"""Where servers and trainers meet: one RPC group whose members come and go, at an address of server 0's machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from urllib.parse import urlparse

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pibroch import rpc
from pibroch.errors import ConfigError, TrainingError
from pibroch.rpc.agent import current_agent
from pibroch.servers import server

JOIN_TIMEOUT_S = 120.0
LOST_AFTER_S = 15.0
"""A host that is silent for so long is given up. One that is busy, or stopped for a moment, is to slow the run down only."""
TLS_VARIABLE = "PIBROCH_SERVERS_TLS"
_LARGEST_NUMBER = 1 << 20


def server_name(number: int) -> str:
    """The worker that server ``number`` is."""
    return f"embedding{number}"


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
    if not 0 <= number < _LARGEST_NUMBER:
        raise ConfigError(f"embedding server {number}", "a number from 0", "number the servers 0, 1, 2, ...")
    store = _store(meet, number == 0 if opens is None else opens)
    rpc.init_rpc(server_name(number), rank=number, rpc_backend_options=_options(store))
    agent = current_agent()
    agent.when_lost(
        lambda worker, incarnation: agent.submit(partial(server.SERVER.on_lost, worker, incarnation))
    )  # may wait
    store.set(f"ready/{number}", "")


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
    store = _store(meet, False, timeout_s)
    for number in range(num_servers):
        try:
            store.wait([f"ready/{number}"], timedelta(seconds=timeout_s))
        except (dist.DistError, RuntimeError) as error:
            raise _absent(number, meet, timeout_s) from error
    name, worker_id = f"trainer{rank}", _LARGEST_NUMBER + rank
    rpc.init_rpc(name, rank=worker_id, rpc_backend_options=_options(store))
    return tuple(map(server_name, range(num_servers)))


def leave() -> None:
    """Leave the group, without waiting for anything."""
    rpc.shutdown(graceful=False)


def tls_of(environ: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Paths of certificate, key and authorities from ``PIBROCH_SERVERS_TLS``, with commas between them.

    Raises:
        ConfigError: when they are not three.
    """
    text = environ.get(TLS_VARIABLE)
    if not text:
        return None
    paths = text.split(",")
    if len(paths) != 3:
        raise ConfigError(f"{TLS_VARIABLE}={text}", "CERTIFICATE,KEY,AUTHORITIES: three paths of PEM files")
    return paths[0], paths[1], paths[2]


def _options(store: TCPStore) -> rpc.RpcBackendOptions:
    served = [server.__name__]
    return rpc.RpcBackendOptions(store=store, tls=tls_of(os.environ), lost_after_s=LOST_AFTER_S, allowed_modules=served)


def _store(meet: str, is_host: bool, timeout_s: float = JOIN_TIMEOUT_S) -> TCPStore:
    url = urlparse(meet)
    try:
        host, port = url.hostname, url.port
    except ValueError:
        host, port = None, None
    if url.scheme != "tcp" or not host or not port:
        raise ConfigError(f"meeting place {meet!r}", "tcp://HOST:PORT")
    try:
        return TCPStore(host, port, None, is_host, timedelta(seconds=timeout_s), wait_for_workers=False)
    except (dist.DistError, RuntimeError) as error:
        if is_host:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"{meet}, where server 0 cannot listen ({reason})", "a free port of this machine"
            ) from error
        raise _absent(0, meet, timeout_s) from error


def _absent(number: int, meet: str, timeout_s: float) -> TrainingError:
    return TrainingError(
        f"no embedding server {number} at {meet} within {timeout_s:g} s",
        "all servers",
        f"start it: pibroch embedding-server --meet {meet} --number {number}",
    )
