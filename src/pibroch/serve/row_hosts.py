"""Hosts that hold parts of the tables, as the one that scores asks them.

See :mod:`pibroch.serve.parts`.

A request is sent when it is made and its answer read when it is needed, or, in an event loop, as it
comes: so that hosts and the caller work at the same time without a thread for any of it. Every wait
ends with the deadline.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from functools import partial
from urllib.parse import urlsplit

from pibroch.errors import ConfigError, WorkerLostError
from pibroch.serve.parts import ANSWER, PROTOCOL

ANSWER_TIMEOUT_S = 2.0
"""For a host to be connected to and to answer; requests that need its rows are refused then."""
_LEFT_ALONE_S = 1.0  # after it did not answer at all, in which nobody waits for it again
_MOST_KEPT = 8
_MOST_HEAD_BYTES = 64 << 10
_NOT_YET = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_CLOSED = "it closed the connection in the middle of an answer"


class _Refused(Exception):
    """A host that says no; its status and its reason."""


class _Connection:
    """A connection with at most one request on its way."""

    def __init__(self, opened: socket.socket) -> None:
        self._socket = opened
        self.process = os.getpid()
        # whether it has answered before, so that it may have been closed since
        self.is_kept = False
        self.loop: asyncio.AbstractEventLoop | None = None
        self.on_bytes: Callable[[], None] | None = None

    def watch(self, loop: asyncio.AbstractEventLoop, on_bytes: Callable[[], None]) -> None:
        """Have an event loop call when bytes come.

        It looks until the end, as a look costs less than its begin and end.
        """
        self.on_bytes = on_bytes
        if self.loop is not loop:
            loop.add_reader(self._socket.fileno(), self._come)
            self.loop = loop

    def _come(self) -> None:
        if self.on_bytes is None:
            self.close()  # nothing was asked: it is the end
        else:
            self.on_bytes()

    def enter(self, request: bytes, deadline: float) -> None:
        """Make it one for rows; raises _Refused."""
        self.send(request, deadline)
        head = b""
        body = b""
        while b"\r\n\r\n" not in head:
            head += self._some(deadline)
            if len(head) > _MOST_HEAD_BYTES:
                raise ConnectionError("it answers without an end")
        head, _, body = head.partition(b"\r\n\r\n")
        status = re.match(rb"HTTP/1\.[01] (\d{3})\b", head)
        if status is None:
            raise ConnectionError(f"it answers with what is no HTTP: {head[:40]!r}")
        if status[1] != b"101":
            content_length = re.search(rb"(?i)\r\ncontent-length: *(\d{1,9})", head)
            length = min(int(content_length[1]) if content_length else 0, _MOST_HEAD_BYTES)
            while len(body) < length:
                body += self._some(deadline)
            raise _Refused(f"it answers {int(status[1])}: {_reason(body)}")
        if body:
            raise ConnectionError("it answers before it is asked")

    def send(self, request: bytes, deadline: float | None) -> None:
        self._wait_until(deadline)
        self._socket.sendall(request)

    def receive_into(self, room: memoryview, deadline: float | None) -> int:
        """The number of bytes that came, at least one."""
        self._wait_until(deadline)
        count = self._socket.recv_into(room)
        if not count:
            raise ConnectionError(_CLOSED)
        return count

    def close(self) -> None:
        if self.loop is not None:
            self.loop.remove_reader(self._socket.fileno())
            self.loop = None
        self._socket.close()

    def _some(self, deadline: float) -> bytes:
        self._wait_until(deadline)
        read = self._socket.recv(_MOST_HEAD_BYTES)
        if not read:
            raise ConnectionError(_CLOSED)
        return read

    def _wait_until(self, deadline: float | None) -> None:
        """The next call waits so long; not at all without a deadline."""
        if deadline is None:
            if self._socket.gettimeout() != 0:
                self._socket.settimeout(0)
            return
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
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts = urlsplit("")
            port = None
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or parts.path not in ("", "/")
            or parts.query
        ):
            raise ConfigError(
                f"--rows-at {url}", "the URL of a host's server", "say e.g. http://10.0.0.2:8000"
            )
        self.url = url
        self._address = parts.hostname, port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        bearer = "" if token is None else f"authorization: Bearer {token}\r\n"
        address = parts.netloc.rpartition("@")[2]
        self._head = (
            f"HTTP/1.1\r\nhost: {address}\r\n{bearer}connection: upgrade\r\nupgrade:"
            f" {PROTOCOL}\r\n\r\n"
        )
        self._kept: list[_Connection] = []
        # of these, those of an event loop, which others leave alone
        self._watched: list[_Connection] = []
        self._lost: tuple[float, str] = (0.0, "")

    def ask(
        self, path: str, request: bytes, most_bytes: int, deadline: float, waits: bool = True
    ) -> RowRequest:
        """Send a request on a connection opened at a path.

        Nothing is waited for but a connection, if that.

        Raises:
            BlockingIOError: when one had to be waited for and must not.
            WorkerLostError: when there is none to be had by the deadline (of
                :func:`time.monotonic`).
        """
        until, reason = self._lost
        if time.monotonic() < until:
            raise WorkerLostError(self.url, reason)
        connection = None if waits else self._sent_on(self._watched, request, None)
        connection = connection or self._sent_on(self._kept, request, deadline if waits else None)
        if connection is None:
            if not waits:
                raise BlockingIOError
            connection = self.sent_anew(path, request, deadline)
        return RowRequest(self, path, request, most_bytes, deadline, connection)

    def _sent_on(
        self, kept: list[_Connection], request: bytes, deadline: float | None
    ) -> _Connection | None:
        """A connection that was kept, on which a request was sent, where there is one."""
        while True:
            try:
                connection = kept.pop()
            except IndexError:
                return None
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

    def sent_anew(self, path: str, request: bytes, deadline: float) -> _Connection:
        """A connection that was opened for a request, which was sent."""
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
        connection.on_bytes = None
        kept = self._kept if connection.loop is None else self._watched
        if len(kept) < _MOST_KEPT:
            kept.append(connection)
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
    """A request on its way to a host, and what has come of its answer."""

    def __init__(
        self,
        host: RowHost,
        path: str,
        request: bytes,
        most_bytes: int,
        deadline: float,
        connection: _Connection,
    ) -> None:
        self._host = host
        self._path = path
        self._request = request
        self._deadline = deadline
        self._connection = connection
        self._room = memoryview(bytearray(ANSWER.size + most_bytes))
        self._taken = 0

    def watch(self, loop: asyncio.AbstractEventLoop, on_bytes: Callable[[], None]) -> None:
        """Have an event loop call when bytes come, until the answer was taken.

        In its thread, as are all calls then.
        """
        self._connection.watch(loop, on_bytes)

    def read(self) -> bool:
        """Take what has come, without waiting; whether that is all. Raises OSError."""
        try:
            self._take(None)
        except _NOT_YET:
            return False
        self._connection.on_bytes = None
        return True

    def answer(self) -> memoryview:
        """The rows; blocks until the deadline at most.

        Raises:
            WorkerLostError: when there are none, or it refuses.
        """
        try:
            self._take(self._deadline)
        except OSError as error:
            connection = self._connection
            connection.close()
            if not connection.is_kept or self._taken or isinstance(error, TimeoutError):
                raise self._host.lost(error) from error
            self._take_anew()
        status, _ = ANSWER.unpack_from(self._room)
        body = self._room[ANSWER.size : self._taken]
        if status != 200:
            self._connection.close()
            reason = bytes(body[:400]).decode("utf-8", "replace")
            raise WorkerLostError(self._host.url, f"it answers {status}: {reason}")
        self._host.keep(self._connection)
        return body

    def cancel(self) -> None:
        """Nobody wants the answer any more."""
        self._connection.close()

    def _take_anew(self) -> None:
        """On another connection: it was closed since."""
        self._connection = self._host.sent_anew(self._path, self._request, self._deadline)
        try:
            self._take(self._deadline)
        except OSError as error:
            self._connection.close()
            raise self._host.lost(error) from error

    def _take(self, deadline: float | None) -> None:
        """Read until all is there."""
        while self._taken < (end := self._end()):
            self._taken += self._connection.receive_into(self._room[self._taken :], deadline)
        if self._taken > end:
            raise ConnectionError("it answers more than it is asked")

    def _end(self) -> int:
        """How many bytes the answer has, as far as is known."""
        if self._taken < ANSWER.size:
            return ANSWER.size
        _, length = ANSWER.unpack_from(self._room)
        end: int = ANSWER.size + length
        if end > len(self._room):
            raise ConnectionError(f"it answers with {length:,} bytes")
        return end


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


def when_read(
    loop: asyncio.AbstractEventLoop, requests: Sequence[RowRequest], then: Callable[[bool], None]
) -> None:
    """Call a function when all answers are there or their time is up, while the loop goes on.

    Args:
        loop: that runs.
        requests: just sent.
        then: called once; with false as soon as a connection fails. It takes the answers, or
            cancels the requests.
    """
    if not requests:
        then(True)
        return
    waiting = set(requests)

    def end(is_there: bool) -> None:
        late.cancel()
        then(is_there)

    def read(request: RowRequest) -> None:
        try:
            if not request.read():
                return
        except OSError:
            end(False)
            return
        waiting.discard(request)
        if not waiting:
            end(True)

    late = loop.call_later(ANSWER_TIMEOUT_S, end, True)
    for request in requests:
        request.watch(loop, partial(read, request))
