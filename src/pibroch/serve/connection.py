"""A client's connection, with bounds that uvicorn does not have.

Of time in every state, of a request's bytes, of their number.

Until a request is whole, the connection waits for a head, for the rest of a body (in admission
control) or, after an answer, for the next request; while an answer is sent, for the client to read
it. No byte of a client moves one of these deadlines: only a whole head and a whole answer do.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pibroch.serve.admission import REFUSAL, error_body
from pibroch.serve.open_connections import Deadline, OpenConnections
from pibroch.serve.settings import Refusal

MOST_HEAD_BYTES = 64 << 10
MOST_PIPELINED = 64
"""Requests behind one that is being answered; to read more at once would keep all others waiting.
"""
_CONTINUE = b"HTTP/1.1 100 "
_JOINED_BYTES = 64 << 10
"""A longer body is not copied behind its head."""
NEVER_S = 1 << 30
"""What uvicorn is given as a timeout that is kept here."""


def connection_factory(
    open_connections: OpenConnections, tls: ssl.SSLContext | None
) -> Callable[..., asyncio.Protocol]:
    """What uvicorn calls for each connection, with the limits of all."""
    make = partial(_BoundedConnection, open_connections)
    return make if tls is None else lambda **kwargs: _TlsHandshake(tls, make(**kwargs))


class _BoundedConnection(HttpToolsProtocol):
    """See the module."""

    def __init__(self, open_connections: OpenConnections, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.limits = open_connections.limits
        self.open_connections = open_connections
        self.url = b""
        self.headers = []
        self._is_in_head = True
        self._num_bytes = 0  # that came since the packet in which the request began
        self._unsent_bytes = 0
        self._last_refusal: Refusal | None = None
        self._read_deadline = Deadline(self.loop, self._read_too_late)
        self._write_deadline = Deadline(self.loop, self.abort)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._read_deadline.set(self.limits.body_timeout_s)
        if not self.open_connections.add(self):
            reason = f"got more than {self.limits.connections} connections; try again"
            self._refuse(Refusal(503, reason, {"retry-after": "1"}))

    def connection_lost(self, exc: Exception | None) -> None:
        self._read_deadline.close()
        self._write_deadline.close()
        self._count_unsent(0)
        self.open_connections.remove(self)
        if self.transport is not None:  # else its TLS handshake has failed
            super().connection_lost(exc)

    def abort(self) -> None:
        """Close now, whatever was not sent yet."""
        self.transport.abort()

    def shutdown(self) -> None:
        """Called by the server when it ends."""
        super().shutdown()
        if self.transport.is_closing():
            self._read_deadline.set(self.limits.write_timeout_s)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._num_bytes += len(data)
        while data:
            try:
                self.parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as upgrade:
                data = self._behind_upgrade(data[upgrade.args[0] :])
            except httptools.HttpParserError:
                self._refuse(Refusal(400, "got an invalid HTTP request; need HTTP/1.1"))
                return
        if self._is_in_head:
            self._check_head_so_far()
        elif self._num_bytes > MOST_HEAD_BYTES + 2 * self.limits.body_bytes:
            self.abort()  # chunks of a few bytes, or trailers without an end

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True
        self._num_bytes = 0

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._read_deadline.clear()
        if self._head_bytes > MOST_HEAD_BYTES:
            self.scope["state"][REFUSAL] = _head_too_long()
        if len(self.pipeline) >= MOST_PIPELINED:
            self._refuse(Refusal(429, f"got more than {MOST_PIPELINED} requests before an answer"))
            raise httptools.HttpParserError  # so that no more is read
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before and self.scope["method"] != "HEAD":  # whose answers have none
            self.cycle.transport = _HeadWithBody(self.transport)  # type: ignore[assignment]

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self._has_open_request:
            self.open_connections.busy(self)

    def on_response_complete(self) -> None:
        has_next = bool(self.pipeline)
        super().on_response_complete()
        if has_next and not self.transport.is_closing():
            return
        self.open_connections.idle(self)
        if self.transport.is_closing():
            self._read_deadline.set(self.limits.write_timeout_s)
        elif self._is_in_head:
            self._read_deadline.set(self.limits.body_timeout_s)
        else:
            self._read_deadline.set(self.limits.idle_timeout_s)
        if self._last_refusal is not None:
            self._refuse(self._last_refusal)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._count_unsent(self.transport.get_write_buffer_size())
        self._write_deadline.set(self.limits.write_timeout_s)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._count_unsent(0)
        self._write_deadline.clear()

    @property
    def _head_bytes(self) -> int:
        """Of the headers so far that are whole, with their separators."""
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    @property
    def _has_open_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _should_upgrade(self) -> bool:
        """Asked by uvicorn, which then leaves the request to :meth:`_behind_upgrade`."""
        return True

    def _behind_upgrade(self, rest: bytes) -> bytes:
        """The parser has stopped behind the head of a request that wants another protocol.

        What it is to read next.
        """
        if self.scope["method"] == "CONNECT":
            self._refuse(Refusal(405, "got CONNECT; need GET, HEAD or POST"))
            return b""
        # A protocol that is not spoken here is passed over (RFC 9110, 7.8), by a parser that has
        # not taken it for an end.
        self.parser = httptools.HttpRequestParser(self)
        method = self.scope["method"].encode()
        version = self.scope["http_version"].encode()
        lines = [method + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n" + rest

    def _check_head_so_far(self) -> None:
        if max(self._num_bytes, self._head_bytes) > MOST_HEAD_BYTES:
            self._refuse(_head_too_long())
        elif not self._has_open_request and not self._num_bytes:  # it has begun in this packet
            self._read_deadline.set(self.limits.body_timeout_s)

    def _read_too_late(self) -> None:
        transport = self.transport
        if transport.is_closing() or transport.get_write_buffer_size():
            self.abort()
            return
        if self._is_in_head:
            reason = f"got no whole request line and headers in {self.limits.body_timeout_s:g} s"
            self._refuse(Refusal(408, reason))
            return
        transport.close()
        self._read_deadline.set(self.limits.write_timeout_s)

    def _refuse(self, refusal: Refusal) -> None:
        """Answer before there is a request that admission control could answer, and close.

        Behind answers that are not given yet.
        """
        if self.transport.is_closing():
            return
        if self._has_open_request and (self.pipeline or not self.cycle.more_body):
            self._last_refusal = self._last_refusal or refusal
            return
        body = error_body(refusal.reason)
        head = (
            f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}\r\ncontent-type:"
            " application/json\r\n"
        )
        headers = {**refusal.headers, "connection": "close", "content-length": str(len(body))}
        head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(f"{head}\r\n".encode() + body)
        self.transport.close()
        self._read_deadline.set(self.limits.write_timeout_s)

    def _count_unsent(self, count: int) -> None:
        self.open_connections.num_bytes += count - self._unsent_bytes
        self._unsent_bytes = count


class _HeadWithBody:
    """What one answer is written to: its head waits for its body, so that both are one packet.

    To send them apart costs a call of the system here and wakes the client twice.
    """

    __slots__ = ("_head", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head: bytes | None = None

    def write(self, part: bytes) -> None:
        """Write the head, or a part of the body; there is one, be it empty."""
        if self._head is not None:
            if len(part) > _JOINED_BYTES:
                self._transport.write(self._head)
                self._head = b""
            self._transport.write(self._head + part)
            self._head = b""
        elif part.startswith(_CONTINUE):
            self._transport.write(part)
        else:
            self._head = part

    def is_closing(self) -> bool:
        """Whether nothing is read any more."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Close the connection once all is sent."""
        self._transport.write(self._head or b"")
        self._transport.close()


class _TlsHandshake(asyncio.Protocol):
    """A connection until its TLS handshake is over: counted, and closed when it takes too long.

    Args:
        context: of the server.
        following: what the connection is from then on.
    """

    def __init__(self, context: ssl.SSLContext, following: _BoundedConnection) -> None:
        self._context = context
        self._next = following

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # of no other kind
        """See :class:`asyncio.Protocol`."""
        self._transport = transport
        following = self._next
        if not following.open_connections.add(self):
            following.open_connections.remove(self)
            self.abort()
            return
        self._handshake = following.loop.start_tls(
            transport,
            following,
            self._context,
            server_side=True,
            ssl_handshake_timeout=following.limits.body_timeout_s,
        )
        # Its first step is made here, not in a task: reading begins behind this method, and needs
        # its protocol by then.
        self._handshake.send(None).add_done_callback(self._end)

    def abort(self) -> None:
        """Close now."""
        self._transport.abort()

    def _end(self, _: asyncio.Future[None]) -> None:
        encrypted = None
        try:
            self._handshake.send(None)
        except StopIteration as done:
            encrypted = done.value
        except (OSError, ssl.SSLError):  # it is no TLS, too late, or gone
            self.abort()
        self._next.open_connections.remove(self)
        if encrypted is not None:
            self._next.connection_made(encrypted)


def _head_too_long() -> Refusal:
    return Refusal(
        431, f"got more than {MOST_HEAD_BYTES:,} bytes of headers", {"connection": "close"}
    )
