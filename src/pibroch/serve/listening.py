"""What every HTTP server here begins with: a bound socket, and uvicorn around bounded connections.

A small one, of few endpoints, runs on a thread of its own beside whatever the process does.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
from collections.abc import Mapping
from typing import Any

import uvicorn

from pibroch.serve.admission import AdmissionControl
from pibroch.serve.connection import NEVER_S, connection_factory
from pibroch.serve.endpoints import Endpoint
from pibroch.serve.open_connections import OpenConnections
from pibroch.serve.prometheus import ServerMetrics
from pibroch.serve.settings import ServerLimits

_BACKLOG = 1024
_SHUTDOWN_S = 1.0
_CLOSE_S = 5.0


def bound_socket(host: str, port: int, shares_port: bool = False) -> socket.socket:
    """A socket at an address, which does not listen yet.

    Args:
        host: name or address.
        port: 0 for any that is free.
        shares_port: whether other processes listen at the port, too.

    Raises:
        OSError: when the address cannot be had.
        OverflowError: for what is no port.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    opened = socket.socket(family, kind, protocol)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shares_port:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # not the resolved port, which wraps around: 65537 would be 1
        opened.bind((address[0], port, *address[2:]))
    except BaseException:
        opened.close()
        raise
    return opened


def url_at(bound: socket.socket, scheme: str = "http") -> str:
    """Where requests go."""
    host, port = bound.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def uvicorn_config(
    admission: AdmissionControl,
    open_connections: OpenConnections,
    shutdown_s: float,
    tls: ssl.SSLContext | None = None,
) -> uvicorn.Config:
    """Uvicorn's settings; what bounds connections is ours."""
    connection: Any = connection_factory(open_connections, tls)
    config = uvicorn.Config(
        admission,
        http=connection,
        ws="none",
        lifespan="off",
        backlog=_BACKLOG,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=NEVER_S,
        timeout_graceful_shutdown=max(1, int(shutdown_s)),
    )
    config.load()
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    return config


class BackgroundServer:
    """Answers on one thread until it is closed, however many connections there are.

    The endpoints' coroutines run on that thread.

    Args:
        endpoints: that answer, by path.
        bound: from :func:`bound_socket`; closed with the server.
        limits: of connections and what they send.
    """

    def __init__(
        self, endpoints: Mapping[str, Endpoint], bound: socket.socket, limits: ServerLimits
    ) -> None:
        self._bound = bound
        self._open_connections = OpenConnections(limits)
        admission = AdmissionControl(endpoints, ServerMetrics(), None, self._open_connections)
        config = uvicorn_config(admission, self._open_connections, _SHUTDOWN_S)
        self._new_loop = config.get_loop_factory()
        self._server = uvicorn.Server(config)
        bound.listen(_BACKLOG)  # so that whoever asks before the thread runs waits for it
        self._thread = threading.Thread(target=self._run, name="pibroch-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End, with up to a second for answers that are under way; blocks."""
        self._server.should_exit = True
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        with self._bound, asyncio.Runner(loop_factory=self._new_loop) as runner:
            try:
                # its public method takes signals, which belong to the main thread
                runner.run(self._server._serve([self._bound]))
            finally:
                self._open_connections.abort_all()
