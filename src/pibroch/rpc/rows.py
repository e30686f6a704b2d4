"""Rows that are elsewhere: asked for by number, over the transport and the admission of calls.

No function is named and no object is made here: a peer with the secret can read rows, and do
nothing else. Neither side blocks, and nothing of it needs a thread of its own where asyncio's loop
turns it (:meth:`RowWorker.attach`).
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from pibroch.errors import ProtocolError, WorkerLostError
from pibroch.kernels.arrays import Ints
from pibroch.rpc.calls.pool import Pool
from pibroch.rpc.calls.requests import Requests
from pibroch.rpc.info import WorkerInfo
from pibroch.rpc.options import Limits, RpcBackendOptions
from pibroch.rpc.transport.connection import Connection, Inbox, Message
from pibroch.rpc.transport.frames import Frame, Kind
from pibroch.rpc.transport.membership import Record
from pibroch.rpc.transport.peers import Peers
from pibroch.rpc.values.callables import Callables
from pibroch.rpc.values.failures import encode_failure
from pibroch.rpc.values.messages import encode
from pibroch.wire.reactor import Reactor

AT_ONCE = 4096
"""Rows that the loop reads itself; of more a thread makes the answer."""
LIMITS = Limits(metadata_bytes=64 << 10, message_bytes=64 << 20, requests=1 << 10)
MOST_OWED_BYTES = 256 << 20
"""Of answers that a peer has not taken."""
_END_S = 2.0
Rows = NDArray[Any]
Give = Callable[[str, Ints], Rows]
"""Rows of a set, by their numbers; raises PibrochError for others than are here."""


class RowReader(Protocol):
    """Reads rows of one set, wherever they are."""

    def read(self, rows: Ints) -> Future[Rows]:
        """Ask for rows ``[V]``; returns at once, from any thread.

        The future has them as bytes, one behind the other, or fails with WorkerLostError; it is
        done within the reader's timeout.
        """


class WantedRows(msgspec.Struct, frozen=True, array_like=True, tag="rows"):
    """The metadata of a request for rows; its payload is their numbers, int64 ``[V]``.

    That of an answer are the rows, and there are no metadata.

    Attributes:
        of: which rows are numbered.
    """

    of: str


_decoder = msgspec.msgpack.Decoder(WantedRows)


class _Connection(Connection):
    """A connection whose payloads are bytes, not tensors."""

    def __init__(
        self,
        worker: RowWorker,
        peer: WorkerInfo,
        incarnation: int,
        limits: Limits,
        inbox: Inbox,
    ) -> None:
        super().__init__(peer, incarnation, limits, inbox)
        self._worker = worker

    def allocate(self, frame: Frame) -> list[memoryview]:
        """Memory for a frame's payload (``frames.Allocate``)."""
        frame.target = np.empty(frame.payload_bytes, np.uint8)
        return [frame.target.data]

    def on_frame(self, frame: Frame) -> None:
        """Handle a whole frame."""
        if frame.kind == Kind.ANSWER:
            self._worker.on_answer(self, frame.number, _payload(frame))
        elif frame.kind == Kind.REQUEST:
            self._worker.on_request(self, frame.number, frame.metadata, _payload(frame))
        elif frame.kind == Kind.FAILURE:
            self._worker.on_failure(self, frame.number, frame.metadata)
        elif frame.kind == Kind.GOODBYE:
            self.left_on_purpose = True
        else:
            raise ProtocolError(f"a frame of kind {frame.kind.name}", "one about rows")


class RowWorker:
    """A process that gives rows, or reads those of others, or both.

    Args:
        info: who it is.
        secret: of all.
        addresses: of those whose rows it reads.
        give: answers; nobody is listened to where absent.
        listens_at: host and port, 0 for any that is free.
        tls: as of ``RpcBackendOptions``.

    Raises:
        ConfigError: for an address that cannot be had, or files of TLS that cannot be used.
    """

    def __init__(
        self,
        info: WorkerInfo,
        secret: bytes,
        addresses: Mapping[WorkerInfo, tuple[str, int]],
        give: Give | None = None,
        listens_at: tuple[str, int] | None = None,
        tls: tuple[str, str, str] | None = None,
    ) -> None:
        self.info = info
        self._secret = secret
        self._addresses = _Addresses(addresses)
        self._give = give
        self._listens_at = listens_at
        self._options = RpcBackendOptions(
            num_streams=0, shared_memory=False, tls=tls, limits=LIMITS
        )
        self._lock = threading.Lock()
        self._open()

    def _open(self) -> None:
        self._process = os.getpid()
        self.is_closed = self._is_started = False
        self.reactor = Reactor("rows")
        self._pool = Pool("rows-worker", 2, self.reactor)
        self._requests = Requests(self.info, self.reactor, Callables(()))
        # with ``on_message`` these make it an ``Inbox``
        self.on_failure = self._requests.on_failure
        self.on_lost = self._requests.lose
        self._peers = Peers(
            self.info,
            self._options,
            self._secret,
            self.reactor,
            self._pool.submit,
            self._addresses,
            self._listens_at,
            self,
            partial(_Connection, self),
        )

    @property
    def port(self) -> int:
        """At which it listens."""
        return self._peers.record.port

    def start(self) -> None:
        """Begin to answer and to read, on a thread of its own; again after a fork."""
        self._begin(lambda: self.reactor.start())

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Go on in asyncio's loop, in whose thread this is called, until :meth:`detach`."""
        self._begin(lambda: None)
        self.reactor.attach(loop)

    def _begin(self, how: Callable[[], None]) -> None:
        with self._lock:
            if self._process != os.getpid():
                self._open()
            if not self._is_started:
                self._is_started = True
                how()

    def detach(self) -> None:
        """Go on on a thread of its own."""
        self.reactor.detach()

    def close(self) -> None:
        """Say goodbye and end; not in the loop's thread."""
        self.is_closed = True
        self._peers.close()
        self._requests.lose_all("it was closed")
        self.reactor.stop()
        self._pool.close(_END_S)

    def on_message(self, connection: Connection, message: Message) -> None:
        """See ``connection.Inbox``: there are no messages with tensors."""
        raise ProtocolError("a message", "a request for rows")

    def on_answer(self, connection: Connection, number: int, payload: Rows) -> None:
        """Handle rows that have come."""
        call = self._requests.taken(connection, number)
        if call is not None:
            call.receiver.succeed(payload)

    def on_request(
        self, connection: Connection, number: int, metadata: bytes, payload: Rows
    ) -> None:
        """Give rows, or say why not; what is long, a thread does."""
        try:
            wanted = _decoder.decode(metadata)
            if self._give is None or not 0 < len(payload) == len(payload) // 8 * 8:
                raise ProtocolError("a request for rows without numbers", "int64 [V]")
            if max(connection.bytes_owed, 8 * AT_ONCE * connection.num_at_work) > MOST_OWED_BYTES:
                raise ProtocolError("one more request for rows", "answers that are taken")
        except (ProtocolError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            connection.send_failure(number, encode_failure(error))
            return
        numbers = payload.view(np.int64)
        if len(numbers) <= AT_ONCE:
            self._answer(connection, number, wanted.of, numbers)
            return

        def answer() -> None:
            self._answer(connection, number, wanted.of, numbers)
            connection.num_at_work -= 1

        connection.num_at_work += 1
        self._pool.submit(answer)

    def _answer(self, connection: Connection, number: int, of: str, numbers: Ints) -> None:
        assert self._give is not None
        try:
            rows = _bytes_of(self._give(of, numbers))
        except Exception as error:
            connection.send_failure(number, encode_failure(error))
        else:
            connection.send(Kind.ANSWER, number, b"", [rows.data])

    def read(
        self,
        worker: WorkerInfo,
        of: str,
        rows: Ints,
        timeout_s: float,
        explained: Callable[[BaseException], BaseException] = lambda error: error,
    ) -> Future[Rows]:
        """See :class:`RowReader`; a connection that has ended meanwhile is made anew, once.

        ``explained`` makes the future's error of what happened.
        """
        if self._process != os.getpid() or not self._is_started:
            self.start()
        deadline = time.monotonic() + timeout_s
        reading = _Reading(self, worker, WantedRows(of), rows, deadline, explained)
        reading.ask()
        return reading.future

    def ask(self, reading: _Reading, timeout_s: float) -> None:
        """Send a request, whose outcome ``reading`` gets."""
        connection = self._peers.connection_to(reading.worker)
        rows = _bytes_of(reading.rows)
        number = self._requests.expect(connection, reading, timeout_s)
        connection.send(Kind.REQUEST, number, encode(reading.wanted), [rows.data])


class _Reading:
    """A request for rows, and the future of its answer."""

    __slots__ = (
        "_deadline", "_explained", "_here", "_is_again", "future", "rows", "wanted", "worker"
    )  # fmt: skip

    def __init__(
        self,
        here: RowWorker,
        worker: WorkerInfo,
        wanted: WantedRows,
        rows: Ints,
        deadline: float,
        explained: Callable[[BaseException], BaseException],
    ) -> None:
        self._here = here
        self.worker = worker
        self.wanted = wanted
        self.rows = rows
        self._deadline = deadline
        self._explained = explained
        self._is_again = False
        self.future: Future[Rows] = Future()

    def ask(self) -> None:
        """Send it; before the deadline."""
        self._here.ask(self, max(1e-3, self._deadline - time.monotonic()))

    def succeed(self, value: object) -> None:
        """Take the rows (``calls.Receiver``)."""
        assert isinstance(value, np.ndarray)
        self.future.set_result(value)

    def fail(self, error: BaseException) -> None:
        """Take the error, or ask again (``calls.Receiver``)."""
        may_ask_again = isinstance(error, WorkerLostError) and not (
            self._is_again or self._here.is_closed
        )
        if may_ask_again and time.monotonic() < self._deadline:
            self._is_again = True
            self.ask()
        else:
            self.future.set_exception(self._explained(error))


class _Addresses:
    """Workers whose addresses are given, and whose names the system resolves each time."""

    def __init__(self, addresses: Mapping[WorkerInfo, tuple[str, int]]) -> None:
        self._addresses = {info.name: (info, *address) for info, address in addresses.items()}

    def find(self, name: str) -> Record | None:
        """Where it is; blocks for a name that the system has to ask others about."""
        if name not in self._addresses:
            return None
        info, host, port = self._addresses[name]
        return Record(info.name, info.id, 0, "", None, resolved(host), port)

    def forget(self, name: str, left: bool) -> None:
        """They stay known."""

    def renew(self, lost: WorkerInfo) -> None:
        """They meet nowhere."""


def resolved(host: str) -> str:
    """The address of a host's name.

    Raises:
        RuntimeError: for a name that nobody knows.
    """
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise RuntimeError(f"{host}: {error.strerror or error}") from error


def _bytes_of(rows: Rows) -> NDArray[np.uint8]:
    return np.ascontiguousarray(rows).reshape(-1).view(np.uint8)


def _payload(frame: Frame) -> Rows:
    if isinstance(frame.target, np.ndarray):
        return frame.target
    return np.frombuffer(frame.payload or b"", np.uint8)
