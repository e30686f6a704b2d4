"""A link: a socket between two processes that carries a few short lines.

Its end says that the other one is gone.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Mapping
from typing import Any

from pibroch.host import is_one_machine

MAX_LINE_BYTES = 1 << 14
SEND_TIMEOUT_S = 1.0
LOST_HOST_S = 6
"""After so long without an answer a host counts as lost; a process that ends is noticed at once."""

Message = dict[str, Any]


class PeerLink:
    """JSON objects, one a line, over a connected TCP socket, which the link then owns."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = bytearray()
        self._lock = threading.Lock()
        connection.settimeout(SEND_TIMEOUT_S)
        _notice_lost_host(connection)

    def fileno(self) -> int:
        """The socket's descriptor, by which selectors take a link."""
        return self._socket.fileno()

    def send(self, message: Mapping[str, object]) -> bool:
        """Send a message, from any thread; false when nobody hears it."""
        try:
            with self._lock:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> list[Message] | None:
        """Messages that have come, waiting up to a second for some.

        ``None`` when the other end is gone.

        Raises:
            ValueError: for what is no message.
        """
        try:
            data = self._socket.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError:
            return None
        if not data:
            return None
        self._buffer += data
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = bytearray(rest)
        if max(map(len, [*lines, rest])) > MAX_LINE_BYTES:
            raise ValueError(f"a line of more than {MAX_LINE_BYTES} bytes")
        messages = [json.loads(line) for line in lines]
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("a line that is no object")
        return messages

    def close(self) -> None:
        """Let go of the socket."""
        self._socket.close()


def listen() -> socket.socket:
    """A server on a free port of loopback, or of the interface of ``MASTER_ADDR``.

    Loopback is taken where all ranks are on this machine.

    That is the one which it names, or, where it is another machine's, the one that leads to it.
    """
    host = "127.0.0.1" if is_one_machine() else _own_address(os.environ["MASTER_ADDR"])
    return socket.create_server((host, 0), backlog=512)


def _own_address(host: str) -> str:
    """The IPv4 address under which this machine is ``host``, or is seen from it."""
    address = str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            probe.connect((address, 9))  # sends nothing
        return str(probe.getsockname()[0])


def _notice_lost_host(connection: socket.socket) -> None:
    """Probe a silent connection, so that a host which vanished without a word is noticed."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": 2,
        "TCP_KEEPINTVL": 1,
        "TCP_KEEPCNT": LOST_HOST_S - 2,
        "TCP_USER_TIMEOUT": LOST_HOST_S * 1000,
    }
    for name, value in options.items():
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    os.set_inheritable(connection.fileno(), False)
