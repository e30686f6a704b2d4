"""Hosts that hold parts of the tables, as the one that scores asks them: over HTTP, on connections that are kept.

A request is sent when it is made and its answer read when it is needed, so that hosts and the caller work at the same time
without a thread for any of it. Every wait ends with the deadline.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

import httptools

from pibroch.errors import ConfigError, WorkerLostError

ANSWER_TIMEOUT_S = 2.0
"""For a host to be connected to and to answer; requests that need its rows are refused then."""
_LEFT_ALONE_S = 1.0  # after it did not answer at all, in which nobody waits for it again
_MOST_KEPT = 8
_READ_BYTES = 1 << 20


class _Connection:
    """A connection with at most one request on its way."""

    def __init__(self, opened: socket.socket) -> None:
        self._socket, self.process = opened, os.getpid()
        self.is_kept = False  # whether it has answered before, so that it may have been closed since
        self.has_begun = False
        self._body: list[bytes] = []
        self._is_complete = False

    def send(self, request: bytes, deadline: float) -> None:
        self._wait_until(deadline)
        self._socket.sendall(request)

    def receive(self, deadline: float, most_bytes: int) -> tuple[int, bytes, bool]:
        """Status and body of the answer, and whether the connection can be used again."""
        self._body, self._is_complete, self.has_begun = [], False, False
        parser, taken = httptools.HttpResponseParser(self), 0
        while not self._is_complete:
            self._wait_until(deadline)
            read = self._socket.recv(_READ_BYTES)
            if not read:
                raise ConnectionError("it closed the connection in the middle of an answer")
            self.has_begun = True
            taken += len(read)
            if taken > most_bytes:
                raise ConnectionError(f"it answers with more than {most_bytes:,} bytes")
            parser.feed_data(read)
        return parser.get_status_code(), b"".join(self._body), parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        """For the parser."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """For the parser."""
        self._is_complete = True

    def close(self) -> None:
        self._socket.close()

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
        self._head = f"HTTP/1.1\r\nhost: {found.netloc.rpartition('@')[2]}\r\n{bearer}content-length: "
        self._kept: list[_Connection] = []
        self._lost: tuple[float, str] = (0.0, "")

    def ask(self, path: str, body: bytes, most_bytes: int, deadline: float) -> RowRequest:
        """Send a request; nothing is waited for but a connection.

        Raises:
            WorkerLostError: when there is none to be had by the deadline (of :func:`time.monotonic`).
        """
        until, reason = self._lost
        if time.monotonic() < until:
            raise WorkerLostError(self.url, reason)
        request = f"POST {path} {self._head}{len(body)}\r\n\r\n".encode("latin-1") + body
        return RowRequest(self, request, most_bytes, deadline)

    def sent(self, request: bytes, deadline: float, anew: bool = False) -> _Connection:
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
            left = max(1e-3, deadline - time.monotonic())
            opened = socket.create_connection(self._address, left)
            if self._tls is not None:
                opened = self._tls.wrap_socket(opened, server_hostname=self._address[0])
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = _Connection(opened)
            connection.send(request, deadline)
        except OSError as error:
            raise self.lost(error) from error
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

    def __init__(self, host: RowHost, request: bytes, most_bytes: int, deadline: float) -> None:
        self._host, self._request, self._most_bytes, self._deadline = host, request, most_bytes, deadline
        self._connection = host.sent(request, deadline)

    def answer(self) -> bytes:
        """The answer's body; blocks until the deadline at most.

        Raises:
            WorkerLostError: when there is none, or it refuses.
        """
        try:
            return self._answer()
        except (OSError, httptools.HttpParserError) as error:
            connection = self._connection
            connection.close()
            if not connection.is_kept or connection.has_begun or isinstance(error, TimeoutError):
                raise self._host.lost(error) from error
        self._connection = self._host.sent(self._request, self._deadline, anew=True)  # it was closed since
        try:
            return self._answer()
        except (OSError, httptools.HttpParserError) as error:
            self._connection.close()
            raise self._host.lost(error) from error

    def cancel(self) -> None:
        """Nobody wants the answer any more."""
        self._connection.close()

    def _answer(self) -> bytes:
        status, body, can_be_kept = self._connection.receive(self._deadline, self._most_bytes)
        if can_be_kept:
            self._host.keep(self._connection)
        else:
            self._connection.close()
        if status != 200:
            raise WorkerLostError(self._host.url, f"it answers {status}: {_reason(body)}")
        return body


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
