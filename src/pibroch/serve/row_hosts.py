"""Hosts that hold parts of the tables, as the one that scores asks them: see :mod:`pibroch.serve.parts`.

A request is sent when it is made and its answer read when it is needed, so that hosts and the caller work at the same time
without a thread for any of it. Every wait ends with the deadline.
"""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from pibroch.errors import ConfigError, WorkerLostError
from pibroch.serve.parts import ANSWER, PROTOCOL

ANSWER_TIMEOUT_S = 2.0
"""For a host to be connected to and to answer; requests that need its rows are refused then."""
_LEFT_ALONE_S = 1.0  # after it did not answer at all, in which nobody waits for it again
_MOST_KEPT = 8
_MOST_HEAD_BYTES = 64 << 10


class _Refused(Exception):
    """A host that says no; its status and its reason."""


class _Connection:
    """A connection with at most one request on its way."""

    def __init__(self, opened: socket.socket) -> None:
        self._socket, self.process = opened, os.getpid()
        self.is_kept = False  # whether it has answered before, so that it may have been closed since
        self.has_begun = False

    def enter(self, request: bytes, deadline: float) -> None:
        """Make it one for rows; raises _Refused."""
        self.send(request, deadline)
        head, body = b"", b""
        while b"\r\n\r\n" not in head:
            head += self._some(deadline)
            if len(head) > _MOST_HEAD_BYTES:
                raise ConnectionError("it answers without an end")
        head, _, body = head.partition(b"\r\n\r\n")
        status = re.match(rb"HTTP/1\.[01] (\d{3})\b", head)
        if status is None:
            raise ConnectionError(f"it answers with what is no HTTP: {head[:40]!r}")
        if status[1] != b"101":
            said = re.search(rb"(?i)\r\ncontent-length: *(\d{1,9})", head)
            length = min(int(said[1]) if said else 0, _MOST_HEAD_BYTES)
            while len(body) < length:
                body += self._some(deadline)
            raise _Refused(f"it answers {int(status[1])}: {_reason(body)}")
        if body:
            raise ConnectionError("it answers before it is asked")

    def send(self, request: bytes, deadline: float) -> None:
        self._wait_until(deadline)
        self._socket.sendall(request)

    def receive(self, deadline: float, most_bytes: int) -> bytes:
        """The bytes of an answer; raises _Refused."""
        self.has_begun = False
        status, length = ANSWER.unpack(self._exactly(ANSWER.size, deadline))
        if length > most_bytes:
            raise ConnectionError(f"it answers with more than {most_bytes:,} bytes")
        body = self._exactly(length, deadline)
        if status != 200:
            raise _Refused(f"it answers {status}: {bytes(body[:400]).decode('utf-8', 'replace')}")
        return bytes(body)

    def close(self) -> None:
        self._socket.close()

    def _exactly(self, length: int, deadline: float) -> bytearray:
        found, taken = bytearray(length), 0
        view = memoryview(found)
        while taken < length:
            self._wait_until(deadline)
            count = self._socket.recv_into(view[taken:])
            if not count:
                raise ConnectionError("it closed the connection in the middle of an answer")
            self.has_begun = True
            taken += count
        return found

    def _some(self, deadline: float) -> bytes:
        self._wait_until(deadline)
        read = self._socket.recv(_MOST_HEAD_BYTES)
        if not read:
            raise ConnectionError("it closed the connection in the middle of an answer")
        return read

    def _wait_until(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)


class RowHost:
    """A host that holds a part of the rows; asked from any thread, and after a fork.

    Args:
        url: such as ``http://10.0.0.2:8000``.
        token: that it wants.

    Raises:
        ConfigError: for another kind of URL.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        try:
            found = urlsplit(url)
            port = found.port
        except ValueError:
            found, port = urlsplit(""), None
        if found.scheme not in ("http", "https") or not found.hostname or found.path not in ("", "/") or found.query:
            raise ConfigError(f"--rows-at {url}", "the URL of a host's server", "say e.g. http://10.0.0.2:8000")
        self.url = url
        self._address = found.hostname, port or (443 if found.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if found.scheme == "https" else None
        bearer = "" if token is None else f"authorization: Bearer {token}\r\n"
        address = found.netloc.rpartition("@")[2]
        self._head = f"HTTP/1.1\r\nhost: {address}\r\n{bearer}connection: upgrade\r\nupgrade: {PROTOCOL}\r\n\r\n"
        self._kept: list[_Connection] = []
        self._lost: tuple[float, str] = (0.0, "")

    def ask(self, path: str, request: bytes, most_bytes: int, deadline: float) -> RowRequest:
        """Send a request on a connection opened at a path; nothing is waited for but a connection.

        Raises:
            WorkerLostError: when there is none to be had by the deadline (of :func:`time.monotonic`).
        """
        until, reason = self._lost
        if time.monotonic() < until:
            raise WorkerLostError(self.url, reason)
        return RowRequest(self, path, request, most_bytes, deadline)

    def sent(self, path: str, request: bytes, deadline: float, anew: bool = False) -> _Connection:
        """A connection on which a request was sent: one that was kept where there is one, unless it is to be anew."""
        while not anew:
            try:
                connection = self._kept.pop()
            except IndexError:
                break
            try:
                if connection.process == os.getpid():
                    connection.send(request, deadline)
                    return connection
                connection.close()  # another process's, which goes on with it
            except TimeoutError as error:
                connection.close()
                raise self.lost(error) from error
            except OSError:
                connection.close()  # it was closed since
        try:
            connection = self._opened(path, deadline)
            connection.send(request, deadline)
        except (OSError, _Refused) as error:
            raise self.lost(error) from error
        return connection

    def _opened(self, path: str, deadline: float) -> _Connection:
        left = max(1e-3, deadline - time.monotonic())
        opened = socket.create_connection(self._address, left)
        if self._tls is not None:
            opened = self._tls.wrap_socket(opened, server_hostname=self._address[0])
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _Connection(opened)
        try:
            connection.enter(f"GET {path} {self._head}".encode("latin-1"), deadline)
        except (OSError, _Refused):
            connection.close()
            raise
        return connection

    def keep(self, connection: _Connection) -> None:
        """For the next request."""
        connection.is_kept = True
        if len(self._kept) < _MOST_KEPT:
            self._kept.append(connection)
        else:
            connection.close()

    def lost(self, error: Exception) -> WorkerLostError:
        """The error to raise; a host that does not answer at all is left alone for a moment."""
        if not isinstance(error, TimeoutError):
            return WorkerLostError(self.url, str(error) or type(error).__name__)
        reason = f"no answer within {ANSWER_TIMEOUT_S:g} s"
        self._lost = time.monotonic() + _LEFT_ALONE_S, reason
        return WorkerLostError(self.url, reason)


class RowRequest:
    """A request on its way to a host."""

    def __init__(self, host: RowHost, path: str, request: bytes, most_bytes: int, deadline: float) -> None:
        self._host, self._path, self._request = host, path, request
        self._most_bytes, self._deadline = most_bytes, deadline
        self._connection = host.sent(path, request, deadline)

    def answer(self) -> bytes:
        """The rows; blocks until the deadline at most.

        Raises:
            WorkerLostError: when there are none, or it refuses.
        """
        try:
            return self._answer()
        except OSError as error:
            connection = self._connection
            connection.close()
            if not connection.is_kept or connection.has_begun or isinstance(error, TimeoutError):
                raise self._host.lost(error) from error
        self._connection = self._host.sent(self._path, self._request, self._deadline, anew=True)  # it was closed since
        try:
            return self._answer()
        except OSError as error:
            self._connection.close()
            raise self._host.lost(error) from error

    def cancel(self) -> None:
        """Nobody wants the answer any more."""
        self._connection.close()

    def _answer(self) -> bytes:
        try:
            found = self._connection.receive(self._deadline, self._most_bytes)
        except _Refused as refused:
            self._connection.close()
            raise self._host.lost(refused) from refused
        self._host.keep(self._connection)
        return found


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])[:400]
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")


def row_hosts(urls: Sequence[str], token: str | None = None) -> tuple[RowHost, ...]:
    """The hosts of all parts, in the order of the parts; errors as of :class:`RowHost`."""
    if len(set(urls)) != len(urls):
        raise ConfigError(f"--rows-at {' '.join(urls)}"[:200], "another host for each part")
    return tuple(RowHost(url, token) for url in urls)
