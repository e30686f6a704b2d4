"""A connection on which another host asks for rows, after the request that opened it.

See :mod:`pibroch.serve.parts`.

It is answered where its bytes come in: a request of a task, headers and a router takes several
times as long as the rows.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pibroch.errors import DataError
from pibroch.kernels.arrays import Ints
from pibroch.serve.direct import DirectRequest, Reply
from pibroch.serve.open_connections import Deadline, OpenConnections
from pibroch.serve.parts import ANSWER, MOST_IDS, PROTOCOL, REQUEST, Part, ids_of_bytes
from pibroch.serve.prometheus import ServerMetrics
from pibroch.serve.row_files import MappedRows
from pibroch.serve.settings import Refusal, ServerLimits
from pibroch.serve.store import ModelStore

logger = logging.getLogger(__name__)
IDS_AT_ONCE = 4096
"""Ids whose rows the event loop copies itself."""
SWITCHING = (
    f"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: {PROTOCOL}\r\n\r\n"
).encode()


class RowService:
    """Answers of a host with one part of the rows, to hosts that score."""

    def __init__(self, store: ModelStore, part: Part) -> None:
        self._store = store
        self._part = part

    def check(self, path: str) -> None:
        """Raise Refusal for the path of another part."""
        if path != self._part.path:
            need = f"{self._part.path}, which is here: --rows-at names hosts in this order"
            raise Refusal(409, f"got a request for rows at {path[:80]}; need {need}")

    def rows_and_ids(self, sha256: str, body: bytes) -> tuple[MappedRows, Ints]:
        """The rows of an export, and the ids among them that a request wants.

        See :mod:`pibroch.serve.parts`. Raises Refusal.
        """
        export = self._store.rows_of(sha256)
        if export is None:
            here = f"need one that is here, such as that of version {self._store.current.version}"
            raise Refusal(409, f"got a request for rows of export {sha256[:12]}; {here}")
        try:
            return export, ids_of_bytes(body, self._part.of(export.num_rows), export.row_bytes)
        except DataError as error:
            raise Refusal(400, str(error)) from error

    async def refuse(self, _: DirectRequest) -> Reply:
        """For what only a host that can have all rows answers."""
        part = f"{self._part.number}/{self._part.count}"
        got = f"got a request for scores at a host of part {part} alone"
        raise Refusal(404, f"{got}; need one with --rows-at")


@dataclass(frozen=True, slots=True)
class RowDoor:
    """How hosts come to rows.

    Attributes:
        rows: that are here.
        check: raises Refusal for the path and the headers of a request that may not come in.
        metrics: of all answers.
        limits: of time; a connection on which nothing is asked may stay for as long as there is
            room for others.
        open_connections: of the server.
    """

    rows: RowService
    check: Callable[[str, Mapping[bytes, bytes]], None]
    metrics: ServerMetrics
    limits: ServerLimits
    open_connections: OpenConnections

    def enter(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        """Raise Refusal for who may not, or is wrong here."""
        self.check(path, headers)
        self.rows.check(path)


class RowConnection(asyncio.Protocol):
    """See the module.

    Args:
        door: by which it came in.
        connections: all of the server, which shuts them down when it ends.
    """

    def __init__(self, door: RowDoor, connections: set[Any]) -> None:
        self._door = door
        self._connections = connections
        self._waiting = bytearray()
        self._is_busy = self._is_full = self._ends = False
        self._unsent_bytes = self._counted_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._read_deadline = Deadline(self._loop, self.abort)
        self._write_deadline = Deadline(self._loop, self.abort)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # of no other kind
        """See :class:`asyncio.Protocol`."""
        self._transport = transport
        self._connections.add(self)
        self._door.open_connections.add(self)
        opened = transport.get_extra_info("socket")
        if opened is not None:  # a host that is gone says no goodbye
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        """See :class:`asyncio.Protocol`."""
        self._connections.discard(self)
        self._read_deadline.close()
        self._write_deadline.close()
        self._waiting.clear()
        self._unsent_bytes = 0
        self._count_bytes()
        self._door.open_connections.remove(self)

    def abort(self) -> None:
        """Close now, whatever was not sent yet."""
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """See :class:`asyncio.Protocol`."""
        self._waiting += data
        self._go_on()

    def pause_writing(self) -> None:
        """See :class:`asyncio.Protocol`: who does not take answers is not heard."""
        self._is_full = True
        self._transport.pause_reading()
        self._unsent_bytes = self._transport.get_write_buffer_size()
        self._write_deadline.set(self._door.limits.write_timeout_s)

    def resume_writing(self) -> None:
        """See :class:`asyncio.Protocol`."""
        self._is_full = False
        self._unsent_bytes = 0
        self._write_deadline.clear()
        self._listen()

    def shutdown(self) -> None:
        """Called by the server when it ends: the answer that is being made is still given."""
        self._ends = True
        if not self._is_busy:
            self._transport.close()

    @property
    def _can_go_on(self) -> bool:
        return not (self._is_busy or self._is_full or self._transport.is_closing())

    def _listen(self) -> None:
        self._go_on()
        if self._can_go_on:
            self._transport.resume_reading()

    def _go_on(self) -> None:
        """Answer all requests that are there."""
        waiting = self._waiting
        while len(waiting) >= REQUEST.size and self._can_go_on:
            checksum, count = REQUEST.unpack_from(waiting)
            # one too many is enough to be told so
            end = REQUEST.size + 8 * min(count, MOST_IDS + 1)
            if len(waiting) < end:
                break
            body = bytes(memoryview(waiting)[REQUEST.size : end])
            del waiting[:end]
            self._answer(checksum.hex(), body)
            if count > MOST_IDS:
                self._transport.close()
        if not (waiting and self._can_go_on):
            self._read_deadline.clear()
        elif not self._read_deadline.is_set:  # for the rest of a request
            self._read_deadline.set(self._door.limits.body_timeout_s)
        self._count_bytes()

    def _count_bytes(self) -> None:
        before = self._counted_bytes
        self._counted_bytes = len(self._waiting) + self._unsent_bytes
        if self._counted_bytes == before:
            return
        self._door.open_connections.num_bytes += self._counted_bytes - before
        if self._door.open_connections.num_bytes > self._door.limits.total_bytes:
            self.abort()

    def _answer(self, sha256: str, body: bytes) -> None:
        started = time.monotonic()
        try:
            rows, row_ids = self._door.rows.rows_and_ids(sha256, body)
            if len(row_ids) <= IDS_AT_ONCE:
                self._send(200, _copied(rows, row_ids), started)
                return
        except Refusal as refusal:
            self._send(refusal.status, refusal.reason.encode(), started)
            return
        except Exception as error:
            self._fail(error, started)
            return
        self._is_busy = True
        self._door.open_connections.busy(self)
        self._transport.pause_reading()
        copying = self._loop.run_in_executor(None, _copied, rows, row_ids)
        copying.add_done_callback(lambda copied: self._send_later(copied, started))

    def _send_later(self, copied: asyncio.Future[bytes], started: float) -> None:
        self._is_busy = False
        self._door.open_connections.idle(self)
        try:
            self._send(200, copied.result(), started)
        except Exception as error:
            self._fail(error, started)
        if self._ends:
            self._transport.close()
        self._listen()

    def _fail(self, error: Exception, started: float) -> None:
        logger.error("a request for rows failed", exc_info=error)
        self._send(500, b"the server failed; its log has the reason", started)

    def _send(self, status: int, body: bytes, started: float) -> None:
        if not self._transport.is_closing():
            self._transport.write(ANSWER.pack(status, len(body)) + body)
        self._door.metrics.request("rows", status, time.monotonic() - started)


def _copied(rows: MappedRows, row_ids: Ints) -> bytes:
    return rows.exported(row_ids).tobytes()
