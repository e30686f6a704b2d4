"""A client's connection before there is a request: uvicorn waits for a request's head for ever, and takes all of it."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pibroch.serve.gate import error_body
from pibroch.serve.parts import PROTOCOL
from pibroch.serve.row_connection import SWITCHING, RowConnection, RowDoor
from pibroch.serve.settings import Refusal, ServerLimits

MOST_HEAD_BYTES = 64 << 10


def connection_class(limits: ServerLimits, door: RowDoor | None = None) -> type[asyncio.Protocol]:
    """What uvicorn makes for each connection, with these limits; hosts that want rows come in by the door."""

    class HttpConnection(_BoundedConnection):
        head_timeout_s = limits.body_timeout_s
        row_door = door

    return HttpConnection


class _BoundedConnection(HttpToolsProtocol):
    """Ends connections whose next request's line and headers do not come in time, or are too long."""

    head_timeout_s = 15.0
    row_door: RowDoor | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_timer is None or self.transport.is_closing():
            return
        self._head_bytes += len(data)
        if self._head_bytes > MOST_HEAD_BYTES:
            self._refuse(Refusal(431, f"got more than {MOST_HEAD_BYTES:,} bytes of headers"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_timer is None:
            self._expect_head()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        super().on_headers_complete()

    def _should_upgrade(self) -> bool:
        """Asked by uvicorn, which knows of WebSockets alone."""
        return self.row_door is not None and self._get_upgrade() == PROTOCOL.encode()

    def handle_websocket_upgrade(self) -> None:
        """Called by uvicorn where :meth:`_should_upgrade`: the connection is one for rows from now on, or refused."""
        assert self.row_door is not None
        try:
            self.row_door.enter(self.url.decode("latin-1"), dict(self.headers))
        except Refusal as refusal:
            self._refuse(refusal)
            return
        self.connections.discard(self)
        connection = RowConnection(self.row_door, self.connections)
        self.transport.write(SWITCHING)
        self.transport.set_protocol(connection)
        connection.connection_made(self.transport)

    def _expect_head(self) -> None:
        self._head_bytes = 0
        reason = f"got no whole request line and headers in {self.head_timeout_s:g} s"
        self._head_timer = self.loop.call_later(
            self.head_timeout_s, self._refuse, Refusal(408, reason)
        )

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, refusal: Refusal) -> None:
        self._stop_timer()
        body = error_body(refusal.reason)
        head = f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}\r\ncontent-type: application/json\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in refusal.headers.items())
        self.transport.write(
            f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body
        )
        self.transport.close()
