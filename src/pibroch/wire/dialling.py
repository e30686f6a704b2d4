"""Dialling one stream, again and again while the worker lives but is busy."""

from __future__ import annotations

import errno
import random
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pibroch.errors import PibrochError
from pibroch.wire.admit import Admission
from pibroch.wire.handshake import Client
from pibroch.wire.reactor import Reactor

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
CLOSED_FOR_S = 30.0
"""A worker that closes connections before they are admitted for so long is lost.

A worker that is merely under load stops doing so.
"""
_BUSY = (errno.EAGAIN, errno.EINTR)  # the worker's queue of connections is full


@dataclass(slots=True, eq=False)
class Dialling:
    """Dials one stream until the worker admits it, refuses it, or is gone; all on the loop.

    A process that listens is alive: its kernel accepts the connection whatever the process does,
    and closes it when the process ends. So once connected this waits for as long as the connection
    lives, which TCP's keep-alive ends for a host that vanished; callers have timeouts of their own.
    A connection that ends before it is admitted is dialled again, after a pause that doubles.

    Args:
        reactor: the loop.
        open_socket: begins to connect; may raise ``OSError``.
        make_core: this side of a new handshake.
        on_admitted: gets the socket and this side of the handshake.
        on_failed: gets the reason when dialling is given up.
        is_wanted: whether the stream is still needed.
        connect_s: a host that accepts no connection in this time is gone.
        tls: wraps the socket first.
    """

    reactor: Reactor
    open_socket: Callable[[], socket.socket]
    make_core: Callable[[], Client]
    on_admitted: Callable[[socket.socket, Client], None]
    on_failed: Callable[[Exception], None]
    is_wanted: Callable[[], bool]
    connect_s: float
    tls: ssl.SSLContext | None = None
    _pause_s: float = field(default=FIRST_PAUSE_S, init=False)
    _began: float = field(default_factory=time.monotonic, init=False)

    def start(self) -> None:
        """Dial, unless the stream is no longer needed."""
        if not self.is_wanted():
            return
        core = self.make_core()
        try:
            sock = self.open_socket()
        except OSError as error:
            self._failed(error)
            return
        Admission(
            self.reactor,
            sock,
            core,
            self.connect_s,
            lambda admitted: self.on_admitted(admitted, core),
            self._failed,
            self.tls,
        )

    def _failed(self, error: Exception) -> None:
        if not self.is_wanted():
            return
        if is_final(error) or time.monotonic() - self._began > CLOSED_FOR_S:
            self.on_failed(error)
            return
        pause_s = self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self.reactor.call_at(time.monotonic() + pause_s * random.uniform(0.5, 1.0), self.start)


def is_final(error: Exception) -> bool:
    """Whether dialling again is useless: refused, nobody listens, or the host does not answer."""
    if isinstance(error, (PibrochError, TimeoutError, ssl.SSLError)):
        return True
    if isinstance(error, (ConnectionResetError, BrokenPipeError, ConnectionAbortedError)):
        return False
    return not (
        type(error) is ConnectionError or (isinstance(error, OSError) and error.errno in _BUSY)
    )
