"""All connections of a worker: dialled when first needed, or accepted from those with the secret.

Threads: ``connection_to`` is called from any thread; looking a worker up in the store may block, so
that runs on the pool. All else runs on the loop. The lock guards both collections of connections.
"""

from __future__ import annotations

import errno
import functools
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import NoReturn, Protocol

from pibroch.errors import ConfigError, PibrochError, ProtocolError
from pibroch.host import this_machine
from pibroch.rpc.info import WorkerInfo
from pibroch.rpc.options import Limits, RpcBackendOptions
from pibroch.rpc.transport.connection import Connection, Inbox
from pibroch.rpc.transport.frames import Frame, FrameReader, Kind
from pibroch.rpc.transport.membership import Record
from pibroch.rpc.transport.sharing import Sharing
from pibroch.rpc.transport.stream import FrameStream
from pibroch.wire import tls
from pibroch.wire.admit import Listener, dial
from pibroch.wire.alive import wait_for_reader
from pibroch.wire.dialling import Dialling
from pibroch.wire.handshake import Client, Server
from pibroch.wire.handshake_messages import IDLE, Identity, Purpose
from pibroch.wire.reactor import Reactor

log = logging.getLogger(__name__)

_MAX_CHUNK_METADATA_BYTES = 64
_MAX_LOST_REMEMBERED = 4096
_FLUSH_S = 2.0  # a worker that leaves waits this long for its queues to empty


class AddressBook(Protocol):
    """Where other workers are (``membership.py``)."""

    def find(self, name: str) -> Record | None:
        """The worker of this name, ``None`` when there is none; may block."""

    def forget(self, name: str, left: bool) -> None:
        """It has left, or was lost."""

    def renew(self, lost: WorkerInfo) -> None:
        """A lost worker may have taken the place with it where workers meet; may block."""


class Peers:
    """All connections of one worker.

    Args:
        info: this worker.
        options: limits, streams, TLS and shared memory.
        secret: the job's.
        reactor: the loop.
        submit: runs a function on a thread that may block.
        membership: finds the addresses of other workers.
        listens_at: address to listen on, and port, 0 for any that is free; ``None`` for nowhere.
        inbox: receives what arrives on any connection.
        make_connection: of a worker, its incarnation, limits and the inbox's.
    """

    def __init__(
        self,
        info: WorkerInfo,
        options: RpcBackendOptions,
        secret: bytes,
        reactor: Reactor,
        submit: Callable[[Callable[[], None]], None],
        membership: AddressBook,
        listens_at: tuple[str, int] | None,
        inbox: Inbox,
        make_connection: Callable[[WorkerInfo, int, Limits, Inbox], Connection] = Connection,
    ) -> None:
        self._make_connection = make_connection
        self.info = info
        self.incarnation = secrets.randbits(62)
        self._options = options
        self._secret = secret
        self._reactor = reactor
        self._submit = submit
        self._membership = membership
        self.on_message = inbox.on_message
        self.on_failure = inbox.on_failure
        self._on_connection_lost = inbox.on_lost
        self._identity = Identity(info.name, info.id, self.incarnation)
        self._machine = this_machine()
        self._dialled: dict[int, Connection] = {}
        self._accepted: set[Connection] = set()
        self._lock = threading.Lock()
        self._lost: dict[tuple[int, int], None] = {}  # workers and incarnations, the latest
        self._lost_callbacks: list[Callable[[WorkerInfo, int], None]] = []
        self._is_closing = False
        self._listeners: list[Listener] = []
        self.record = self._listen(*listens_at or ("", 0))

    def when_lost(self, callback: Callable[[WorkerInfo, int], None]) -> None:
        """Call ``callback(worker, incarnation)`` on the loop when a worker is lost or leaves.

        It is also called when a worker cannot be reached: then the incarnation is 0.
        """
        self._lost_callbacks.append(callback)

    def connection_to(self, worker: WorkerInfo) -> Connection:
        """The connection to ``worker``, which is dialled first if there is none; never blocks."""
        connection = self._dialled.get(worker.id)
        if connection is not None:
            return connection
        with self._lock:
            connection = self._dialled.get(worker.id)
            if connection is None:
                connection = self._new_connection(worker, 0)
                self._dialled[worker.id] = connection
                self._submit(functools.partial(self._look_up, connection))
        return connection

    def incarnation_of(self, worker: WorkerInfo) -> int:
        """The incarnation of ``worker`` that is connected at present, 0 while unknown."""
        if worker.id == self.info.id:
            return self.incarnation
        connection = self._dialled.get(worker.id)
        if connection is not None and connection.incarnation:
            return connection.incarnation
        return next(
            (each.incarnation for each in self.connections() if each.peer.id == worker.id), 0
        )

    def connections(self) -> list[Connection]:
        """All connections, dialled and accepted."""
        with self._lock:
            return [*self._dialled.values(), *self._accepted]

    def close(self) -> None:
        """Send a goodbye on each connection, wait for the queues to empty, and close everything."""
        self._is_closing = True
        connections = self.connections()
        for connection in connections:
            connection.send(Kind.GOODBYE, 0, b"")
        deadline = time.monotonic() + _FLUSH_S
        while (
            any(each.is_sending for each in connections if not each.is_lost)
            and time.monotonic() < deadline
        ):
            time.sleep(0.001)
        done = threading.Event()
        self._reactor.call_soon(lambda: self._close_all(done))
        done.wait(_FLUSH_S)

    def _close_all(self, done: threading.Event) -> None:
        for listener in self._listeners:
            listener.close()
        for connection in self.connections():
            connection.lose("this worker was shut down")
        done.set()

    # dialling

    def _new_connection(self, peer: WorkerInfo, incarnation: int) -> Connection:
        return self._make_connection(peer, incarnation, self._options.limits, self)

    def _look_up(self, connection: Connection) -> None:
        """Find out where a worker listens, then dial; on the pool, as the store may block."""
        try:
            record = self._membership.find(connection.peer.name)
            reason = "nobody of that name has joined" if record is None else ""
        except RuntimeError as error:
            record = None
            reason = f"it cannot be looked up ({error})"
        self._reactor.call_soon(lambda: self._dial(connection, record, reason))

    def _dial(self, connection: Connection, record: Record | None, reason: str) -> None:
        if record is None:
            connection.lose(reason)
            return
        connection.incarnation = record.incarnation
        machine = self._machine if self._options.shared_memory else ""
        self._dial_stream(connection, record, machine, Purpose(secrets.randbits(62)))

    def _dial_stream(
        self, connection: Connection, record: Record, machine: str, purpose: Purpose
    ) -> None:
        """Dial one stream of a connection, and after the first one to another host all others."""
        options = self._options
        is_first = purpose.stream == 0
        is_local = record.address.is_reached_locally(machine)
        if is_local and is_first:
            self._share_memory(connection)

        def admitted(sock: socket.socket, core: Client) -> None:
            if is_first:
                connection.incarnation = core.peer.incarnation
                self._lost.pop((core.peer.id, core.peer.incarnation), None)
            self._open_stream(connection, sock, core.surplus, purpose.stream)
            if is_first and not is_local:
                for stream in (IDLE, *range(1, options.num_streams + 1)):
                    further = Purpose(purpose.connection_id, stream)
                    self._dial_stream(connection, record, machine, further)

        def failed(error: Exception) -> None:
            if purpose.stream not in (0, IDLE):
                log.warning("worker %r takes no stream %d: %s", record.name, purpose.stream, error)
                return  # large tensors travel over the other streams
            connection.refusal = error if isinstance(error, PibrochError) else None
            connection.lose(_why_unreachable(error))

        Dialling(
            self._reactor,
            lambda: dial(record.address, machine, options.lost_after_s),
            lambda: Client(self._secret, self._identity, record.name, purpose),
            admitted,
            failed,
            lambda: not (connection.is_lost or self._is_closing),
            options.lost_after_s,
            tls.client_context(options.tls) if options.tls and not is_local else None,
        ).start()

    def _open_stream(
        self, connection: Connection, sock: socket.socket, surplus: bytes, number: int
    ) -> None:
        """Use a stream of a connection: for messages, for large tensors, or an idle one."""
        limits = self._options.limits
        make = functools.partial(
            FrameStream,
            self._reactor,
            sock,
            on_closed=connection.lose,
            checksums=self._options.checksums,
        )
        if number == IDLE:
            idle = make(FrameReader(0, 0, _refuse), _refuse)
            connection.open_further(idle, surplus, is_bulk=False)
            return
        wait_for_reader(sock)
        if number == 0:
            reader = FrameReader(limits.metadata_bytes, limits.message_bytes, connection.allocate)
            connection.open(make(reader, connection.on_frame), surplus)
            return
        reader = FrameReader(
            _MAX_CHUNK_METADATA_BYTES, limits.message_bytes, connection.allocate_chunk
        )
        bulk = make(reader, connection.on_chunk, on_drained=connection.pull)
        connection.open_further(bulk, surplus, is_bulk=True)

    def _share_memory(self, connection: Connection) -> None:
        def discard(what: object) -> None:
            # the last reference goes on that thread, as unmapping memory takes time
            self._submit([what].clear)

        limit = self._options.limits.message_bytes
        connection.sharing = Sharing(self._reactor, connection.send_buffers, discard, limit)

    # listening

    def _listen(self, host: str, port: int) -> Record:
        unix = None
        if host and self._options.shared_memory:
            unix = f"pibroch-{self.incarnation:016x}"
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            sock.bind("\0" + unix)
            self._listeners.append(self._listener(sock, None))
        if host:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            tcp = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            try:
                if port:  # which the one before may have left a moment ago
                    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tcp.bind((host, port))
            except OSError as error:
                tcp.close()
                raise ConfigError(
                    f"address {host!r}, port {port}, to listen on ({error.strerror})",
                    "one of this machine, and a free port",
                    "see the option bind",
                ) from error
            port = tcp.getsockname()[1]
            self._listeners.append(self._listener(tcp, self._options.tls))
        return Record(
            self.info.name, self.info.id, self.incarnation, self._machine, unix, host, port
        )

    def _listener(self, sock: socket.socket, files: tuple[str, str, str] | None) -> Listener:
        limits = self._options.limits
        return Listener(
            self._reactor,
            sock,
            lambda: Server(self._secret, self._identity),
            self._on_admitted,
            max_strangers=limits.waiting_strangers,
            handshake_s=limits.handshake_s,
            lost_after_s=self._options.lost_after_s,
            tls=tls.server_context(files) if files else None,
        )

    def _on_admitted(self, sock: socket.socket, core: Server) -> None:
        if core.purpose.stream:
            self._on_further_admitted(sock, core)
            return
        connection = self._new_connection(
            WorkerInfo(core.peer.name, core.peer.id), core.peer.incarnation
        )
        connection.number = core.purpose.connection_id
        if sock.family == socket.AF_UNIX:
            self._share_memory(connection)
        self._lost.pop((core.peer.id, core.peer.incarnation), None)
        with self._lock:
            self._accepted.add(connection)
        self._open_stream(connection, sock, core.surplus, 0)

    def _on_further_admitted(self, sock: socket.socket, core: Server) -> None:
        for connection in self.connections():
            key = (connection.number, connection.peer.id, connection.incarnation)
            if key == (core.purpose.connection_id, core.peer.id, core.peer.incarnation):
                self._open_stream(connection, sock, core.surplus, core.purpose.stream)
                return
        log.warning("worker %r opened a stream of a connection that there is not", core.peer.name)
        sock.close()

    # losing

    def on_lost(self, connection: Connection, reason: str) -> None:
        """Handle the loss of a connection, and with it of the worker at its other end."""
        peer = connection.peer
        incarnation = connection.incarnation
        with self._lock:
            self._accepted.discard(connection)
            if self._dialled.get(peer.id) is connection:
                del self._dialled[peer.id]
        self._membership.forget(peer.name, connection.left_on_purpose)
        reason = "it left" if connection.left_on_purpose else reason
        self._on_connection_lost(connection, reason)
        others = [
            each
            for each in self.connections()
            if each.peer.id == peer.id and each.incarnation == incarnation
        ]
        if others and (connection.left_on_purpose or not connection.was_open):
            # a worker that leaves ends each connection itself, and a connection that could not be
            # opened does not mean that the worker is gone
            return
        for other in others:
            other.lose(reason)
        if not connection.was_open:
            self._call_back(peer, 0)
        if (peer.id, incarnation) in self._lost:
            return
        self._lost[peer.id, incarnation] = None
        if len(self._lost) > _MAX_LOST_REMEMBERED:
            del self._lost[next(iter(self._lost))]
        if not self._is_closing:
            level = logging.INFO if connection.left_on_purpose else logging.WARNING
            log.log(level, "worker %r is lost: %s", peer.name, reason)
            if not connection.left_on_purpose:
                self._submit(functools.partial(self._membership.renew, peer))
        self._call_back(peer, incarnation)

    def _call_back(self, peer: WorkerInfo, incarnation: int) -> None:
        for callback in self._lost_callbacks:
            callback(peer, incarnation)


def _why_unreachable(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in (errno.ECONNREFUSED, errno.ENOENT):
        return f"it does not listen any more ({error.strerror})"
    return str(error)


def _refuse(frame: Frame) -> NoReturn:
    raise ProtocolError(f"a frame of kind {frame.kind.name} on a stream that stays idle", "none")
