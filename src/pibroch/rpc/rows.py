"""Rows that are elsewhere: asked for by number, over the transport and the admission of calls.

No function is named and no object is made here: a peer with the secret can read rows, and do
nothing else. Which rows are numbered, requests say in metadata that whoever gives them defines.
Neither side blocks, and nothing of it needs a thread of its own where asyncio's loop turns it
(:meth:`RowWorker.attach`).

V rows of one request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pibroch.errors import ProtocolError, WorkerLostError
from pibroch.kernels.arrays import Bytes
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
from pibroch.wire.reactor import Reactor

log = logging.getLogger(__name__)
AT_ONCE = 4096
"""Rows that the loop reads itself; of more a thread makes the answer."""
LIMITS = Limits(metadata_bytes=64 << 10, message_bytes=64 << 20, requests=1 << 10)
MOST_OWED_BYTES = 256 << 20
"""Of answers that a peer has not taken."""
_END_S = 2.0
Rows = NDArray[Any]
Give = Callable[[WorkerInfo, bytes, Bytes], "Sequence[Rows] | bytes"]
"""Rows that a worker wants, by the metadata and the payload of its request.

In their place it may give a word, one byte at least. It raises PibrochError for rows that are not
here.
"""


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
        if frame.kind == Kind.ANSWER:
            room = self._worker.room_for(self, frame.number, frame.payload_bytes)
            if room is not None:
                return [part.data for part in room]
        frame.target = np.empty(frame.payload_bytes, np.uint8)
        return [frame.target.data]

    def on_frame(self, frame: Frame) -> None:
        """Handle a whole frame."""
        if frame.kind == Kind.ANSWER:
            self._worker.on_answer(self, frame)
        elif frame.kind == Kind.REQUEST:
            self._worker.on_request(self, frame)
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
        num_threads: for answers that are long, or may wait.
        may_wait: whether ``give`` may: then the loop never calls it.
        limits: on what others may send.

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
        *,
        num_threads: int = 2,
        may_wait: bool = False,
        limits: Limits = LIMITS,
    ) -> None:
        self.info = info
        self._secret = secret
        self._addresses = _Addresses()
        self.know(addresses)
        self._give = give
        self._listens_at = listens_at
        self._num_threads = num_threads
        self._at_once = -1 if may_wait else AT_ONCE
        self._options = RpcBackendOptions(
            num_streams=0, shared_memory=False, tls=tls, limits=limits
        )
        self._lock = threading.Lock()
        self._open()

    def _open(self) -> None:
        self._process = os.getpid()
        self.is_closed = self._is_started = False
        self.reactor = Reactor("rows")
        self._pool = Pool("rows-worker", self._num_threads, self.reactor)
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

    def know(self, addresses: Mapping[WorkerInfo, tuple[str, int]]) -> None:
        """Add addresses of those whose rows it reads."""
        self._addresses |= {info.name: (info, *address) for info, address in addresses.items()}

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

    def room_for(self, connection: Connection, number: int, num_bytes: int) -> list[Bytes] | None:
        """Where rows that are coming belong; ``None`` for any memory."""
        reading = self._requests.receiver(connection, number)
        return reading.room(num_bytes) if isinstance(reading, Reading) else None

    def on_answer(self, connection: Connection, frame: Frame) -> None:
        """Handle rows that have come, or a word in their place."""
        call = self._requests.taken(connection, frame.number)
        if call is None:
            return
        if frame.metadata:
            call.receiver.fail(InPlaceOfRows(frame.metadata))
        else:
            call.receiver.succeed(_payload(frame))

    def on_request(self, connection: Connection, frame: Frame) -> None:
        """Give rows, or say why not; what is long or may wait, a thread does."""
        number = frame.number
        metadata = frame.metadata
        payload = _payload(frame)
        try:
            if self._give is None or not len(payload):
                raise ProtocolError("a request for rows without numbers", "some")
            assert connection.stream is not None
            owed = connection.stream.num_queued_bytes, 8 * AT_ONCE * connection.num_at_work
            if max(owed) > MOST_OWED_BYTES:
                raise ProtocolError("one more request for rows", "answers that are taken")
        except ProtocolError as error:
            connection.send_failure(number, encode_failure(error))
            return
        if len(payload) // 8 <= self._at_once:
            self._answer(connection, number, metadata, payload)
            return

        def answer() -> None:
            self._answer(connection, number, metadata, payload)
            connection.num_at_work -= 1

        connection.num_at_work += 1
        self._pool.submit(answer)

    def _answer(self, connection: Connection, number: int, metadata: bytes, payload: Bytes) -> None:
        assert self._give is not None
        try:
            given = self._give(connection.peer, metadata, payload)
            if isinstance(given, bytes):
                connection.send(Kind.ANSWER, number, given)
            else:
                connection.send(Kind.ANSWER, number, b"", [_bytes_of(each) for each in given])
        except Exception as error:
            connection.send_failure(number, encode_failure(error))

    def read(
        self,
        worker: WorkerInfo,
        wanted: bytes,
        numbers: Sequence[Rows],
        timeout_s: float,
        explained: Callable[[BaseException], BaseException] = lambda error: error,
        *,
        into: Sequence[Bytes] | None = None,
        asks_again: bool = True,
    ) -> Reading:
        """Ask for rows; returns at once, from any thread.

        Args:
            worker: whose rows.
            wanted: metadata of the request.
            numbers: of the rows.
            timeout_s: within which the outcome is there.
            explained: makes the reading's error of what happened.
            into: memory that the rows fill; new memory otherwise.
            asks_again: once, where the connection has ended meanwhile.
        """
        if self._process != os.getpid() or not self._is_started:
            self.start()
        deadline = time.monotonic() + timeout_s
        room = None if into is None else list(into)
        reading = Reading(self, worker, wanted, numbers, deadline, explained, room, asks_again)
        self.ask(reading, timeout_s)
        return reading

    def ask(self, reading: Reading, timeout_s: float) -> None:
        """Send a request, whose outcome ``reading`` gets."""
        connection = reading.connection = self._peers.connection_to(reading.worker)
        numbers = [_bytes_of(each) for each in reading.numbers]
        number = self._requests.expect(connection, reading, timeout_s)
        connection.send(Kind.REQUEST, number, reading.wanted, numbers)


class InPlaceOfRows(Exception):
    """A word that a worker gave in place of rows.

    Attributes:
        word: one byte at least.
    """

    def __init__(self, word: bytes) -> None:
        super().__init__(word)
        self.word = word


@dataclass(slots=True, eq=False, repr=False)
class Reading:
    """A request for rows under way; see :meth:`RowWorker.read`. A future of few parts.

    Its outcome are the rows as bytes, one behind the other, or nothing where they went into memory
    of the caller's; or ``explained``'s error, :class:`InPlaceOfRows` without that.
    """

    _here: RowWorker
    worker: WorkerInfo
    wanted: bytes
    numbers: Sequence[Rows]
    _deadline: float
    _explained: Callable[[BaseException], BaseException]
    _into: list[Bytes] | None
    _asks_again: bool
    connection: Connection = field(init=False)  # on which it was sent last
    _is_done: bool = field(default=False, init=False)
    _rows: Rows = field(init=False)
    _error: BaseException | None = field(init=False)
    _callbacks: list[Callable[[], None]] = field(default_factory=list, init=False)

    def done(self) -> bool:
        """Whether the outcome is there."""
        return self._is_done

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call it once, by the thread that has the outcome, or now."""
        self._callbacks.append(callback)
        if self._is_done:
            self._call_back()

    def result(self, timeout_s: float | None = None) -> Rows:
        """The rows, or the error; TimeoutError when nothing is there in time."""
        if not self._is_done:
            is_done = threading.Event()
            self.when_done(is_done.set)
            if not is_done.wait(timeout_s):
                raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._rows

    def wait(self) -> Rows:
        """The result; where nobody reads the answer yet the calling thread does.

        So no other one has to wake it.
        """
        stream = self.connection.stream
        if stream is not None:
            stream.read_until(self.done, self._left_s())
        return self.result()

    def _left_s(self) -> float:
        return max(1e-3, self._deadline - time.monotonic())

    def room(self, num_bytes: int) -> list[Bytes] | None:
        """Memory for an answer, where the caller has some.

        Raises:
            ProtocolError: for another number of bytes than it holds.
        """
        if self._into is not None and sum(map(len, self._into)) != num_bytes:
            raise ProtocolError(
                f"{num_bytes:,} bytes of rows", f"{sum(map(len, self._into)):,}, as asked for"
            )
        return self._into

    def succeed(self, value: object) -> None:
        """Take the rows (``calls.Receiver``), which may be where they belong already."""
        assert isinstance(value, np.ndarray)
        if self._into is None or not len(value):
            self._end(value)
            return
        try:
            self.room(len(value))
        except ProtocolError as error:
            self.fail(error)
            return
        start = 0
        for part in self._into:
            part[:] = value[start : start + len(part)]
            start += len(part)
        self._end(value[:0])

    def fail(self, error: BaseException) -> None:
        """Take the error, or ask again (``calls.Receiver``)."""
        may_ask_again = self._asks_again and isinstance(error, WorkerLostError)
        if may_ask_again and not self._here.is_closed and time.monotonic() < self._deadline:
            self._asks_again = False
            self._here.ask(self, self._left_s())
        else:
            self._end(np.empty(0, np.uint8), self._explained(error))

    def _end(self, rows: Rows, error: BaseException | None = None) -> None:
        self._rows = rows
        self._error = error
        self._is_done = True
        self._call_back()

    def _call_back(self) -> None:
        with suppress(IndexError):  # each is taken by one thread
            while True:
                callback = self._callbacks.pop()
                try:
                    callback()
                except Exception:
                    log.exception("a callback failed")


class _Addresses(dict[str, tuple[WorkerInfo, str, int]]):
    """Workers whose addresses are given, and whose names the system resolves each time."""

    def find(self, name: str) -> Record | None:
        """Where it is; blocks for a name that the system has to ask others about."""
        if name not in self:
            return None
        info, host, port = self[name]
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


def _bytes_of(rows: Rows) -> memoryview:
    if not rows.flags.c_contiguous:
        rows = np.ascontiguousarray(rows)
    return rows.data.cast("B") if rows.size else memoryview(b"")


def _payload(frame: Frame) -> Rows:
    if isinstance(frame.target, np.ndarray):
        return frame.target
    return np.frombuffer(frame.payload or b"", np.uint8)
