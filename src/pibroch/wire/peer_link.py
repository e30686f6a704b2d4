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

from pibroch.wire.sockets import notice_lost_host

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
        notice_lost_host(connection, LOST_HOST_S)
        os.set_inheritable(connection.fileno(), False)

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
