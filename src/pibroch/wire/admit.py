"""From an address to an authenticated socket: the one way in, whoever listens.

Workers, ranks and hosts that serve accept here, with TLS or without. Nothing here blocks. All of it
runs on the loop's thread (``reactor.py``), which is why it takes no locks.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import socket
import ssl
import time
import weakref
from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar, dataclass, field

from pibroch.errors import AuthenticationError, ProtocolError, RpcError
from pibroch.wire.alive import notice_lost_host
from pibroch.wire.bounded_log import BoundedLog
from pibroch.wire.handshake import Client, Server
from pibroch.wire.reactor import READ, WRITE, Reactor
from pibroch.wire.sockets import is_own_user

log = logging.getLogger(__name__)

_MAX_READ_BYTES = 4096
_BACKLOG = 512
_PAUSE_S = 0.1
_ACCEPTS_AT_A_TIME = 64


_refusals_log = BoundedLog(log)
_other_users_log = BoundedLog(log)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a worker or rank listens.

    Attributes:
        machine: boot id and network namespace; workers of one machine use the Unix socket.
        unix: the abstract name of the Unix socket, ``None`` when there is none.
        host: for TCP.
        port: for TCP.
    """

    machine: str
    unix: str | None
    host: str
    port: int

    def is_reached_locally(self, machine: str) -> bool:
        """Whether a worker on ``machine`` uses the Unix socket."""
        return self.unix is not None and self.machine == machine


def tune(sock: socket.socket, lost_after_s: float | None) -> None:
    """Set non-blocking mode, no delay for small frames, and the kernel's limit for a silent host.

    After ``lost_after_s`` without a sign of the other host, the kernel closes the connection; with
    ``None`` it waits.
    """
    sock.setblocking(False)
    if lost_after_s is not None:
        notice_lost_host(sock, lost_after_s)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Admission:
    """One handshake under way, on the loop's thread.

    Args:
        reactor: the loop.
        sock: connected or connecting, non-blocking.
        core: this side of the handshake.
        timeout_s: for a server, the whole handshake; for a client, only until it is connected, as
            it then waits for as long as the connection lives.
        on_admitted: gets the socket; bytes received after the handshake are in ``core.surplus``.
        on_refused: gets the reason; the socket is closed.
        tls: wraps the socket first.
    """

    reactor: Reactor
    sock: socket.socket
    core: Client | Server
    timeout_s: InitVar[float]
    on_admitted: Callable[[socket.socket], None]
    on_refused: Callable[[Exception], None]
    tls: ssl.SSLContext | None = None
    _is_connecting: bool = field(init=False)
    _out: bytearray = field(init=False)
    _is_over: bool = field(default=False, init=False)

    def __post_init__(self, timeout_s: float) -> None:
        self._is_connecting = isinstance(self.core, Client)
        self._out = bytearray(self.core.start())
        self.reactor.watch(self.sock.fileno(), READ | WRITE, self._on_events)
        # a weak reference: strangers may connect faster than these timers run out, so a timer must
        # not keep a handshake that is over
        expire = functools.partial(_expire, weakref.ref(self))
        self.reactor.call_at(time.monotonic() + timeout_s, expire)

    def refuse(self, error: Exception) -> None:
        """Close the socket and report ``error``, unless the handshake is over."""
        if not self._is_over:
            self._is_over = True
            self.reactor.forget(self.sock.fileno())
            self.sock.close()
            self.on_refused(error)

    def expire(self) -> None:
        """End the handshake if it is too late."""
        if isinstance(self.core, Server):
            self.refuse(TimeoutError("no handshake in time"))
        elif self._is_connecting and not _is_connected(self.sock):
            self.refuse(TimeoutError("no connection in time: its host does not answer"))

    def _on_events(self, events: int) -> None:
        try:
            self._advance()
        except (BlockingIOError, ssl.SSLWantReadError):
            self.reactor.change(self.sock.fileno(), READ | (WRITE if self._out else 0))
        except ssl.SSLWantWriteError:
            self.reactor.change(self.sock.fileno(), READ | WRITE)
        except (OSError, RpcError) as error:
            self._send_refusal()
            self.refuse(error)

    def _advance(self) -> None:
        if self._is_connecting:
            self._check_connected()
        if self.tls is not None:
            self._wrap()
        if isinstance(self.sock, ssl.SSLSocket):
            self.sock.do_handshake()
        while not self._is_over:
            if self._out:
                del self._out[: self.sock.send(self._out)]
            if self.core.done and not self._out:
                self._admit()
                return
            data = self.sock.recv(_MAX_READ_BYTES)
            if not data:
                raise ConnectionError("the other side closed the connection during the handshake")
            self._out += self.core.receive(data)

    def _check_connected(self) -> None:
        failure = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failure:
            raise OSError(failure, os.strerror(failure))
        self._is_connecting = False

    def _wrap(self) -> None:
        assert self.tls is not None
        context = self.tls
        self.tls = None
        fd = self.sock.fileno()
        self.reactor.forget(fd)
        self.sock = context.wrap_socket(
            self.sock, server_side=isinstance(self.core, Server), do_handshake_on_connect=False
        )
        self.reactor.watch(self.sock.fileno(), READ | WRITE, self._on_events)

    def _admit(self) -> None:
        self._is_over = True
        self.reactor.forget(self.sock.fileno())
        self.on_admitted(self.sock)

    def _send_refusal(self) -> None:
        """A server's last message to a client that it refuses."""
        refusal = getattr(self.core, "refusal", b"")
        if refusal and not self._is_over:
            try:
                self.sock.send(refusal)
            except OSError as error:
                log.debug("could not send why a connection is refused: %s", error)


def _is_connected(sock: socket.socket) -> bool:
    """Whether the kernel has connected it; a loop that is late may not have seen the event yet."""
    try:
        sock.getpeername()
    except OSError:
        return False
    return True


def _expire(admission: weakref.ref[Admission]) -> None:
    """Handle the timer of a handshake, which may be over and freed by then."""
    if (one := admission()) is not None:
        one.expire()


def dial(address: Address, machine: str, lost_after_s: float) -> socket.socket:
    """A socket that is being connected: the Unix socket when on the same ``machine``, else TCP.

    Raises:
        OSError: when it is clear at once that nobody listens.
    """
    if address.is_reached_locally(machine):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        target: str | tuple[str, int] = f"\0{address.unix}"
    else:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        target = (address.host, address.port)
    tune(sock, lost_after_s)
    failure = sock.connect_ex(target)
    if failure not in (0, errno.EINPROGRESS):
        sock.close()
        raise OSError(failure, os.strerror(failure))
    return sock


@dataclass(slots=True, eq=False)
class Listener:
    """Accepts connections and admits those that know the secret, on the loop's thread.

    A client that has connected and not yet proved that it knows the secret is a *stranger*; at most
    ``max_strangers`` wait at a time. At a Unix socket, processes of other users are refused first.

    Args:
        make_core: this side of a new handshake.
        on_admitted: gets the socket and the handshake of each client that passed.
        handshake_s: the time that a handshake may take.
        lost_after_s: as for ``tune``.
        tls: wraps accepted sockets.
    """

    reactor: Reactor
    sock: socket.socket
    make_core: Callable[[], Server]
    on_admitted: Callable[[socket.socket, Server], None]
    _: KW_ONLY
    max_strangers: int
    handshake_s: float
    lost_after_s: float | None = None
    tls: ssl.SSLContext | None = None
    _strangers: dict[int, Admission] = field(default_factory=dict, init=False)  # oldest first

    def __post_init__(self) -> None:
        self.sock.setblocking(False)
        self.sock.listen(_BACKLOG)
        self.reactor.call_soon(lambda: self.reactor.watch(self.sock.fileno(), READ, self._accept))

    def close(self) -> None:
        """Stop listening and refuse all whose handshake is under way."""
        self.reactor.forget(self.sock.fileno())
        self.sock.close()
        for admission in tuple(self._strangers.values()):
            admission.refuse(ConnectionError("this worker leaves"))

    def _pause(self) -> None:
        """Stop accepting for a moment, as no descriptors are left, and refuse the oldest stranger.

        The listening socket would stay readable and the loop would spin.
        """
        if self._strangers:
            next(iter(self._strangers.values())).refuse(
                ConnectionError("no descriptors are left; the oldest goes")
            )
        self.reactor.change(self.sock.fileno(), 0)
        self.reactor.call_at(time.monotonic() + _PAUSE_S, self._resume)

    def _resume(self) -> None:
        if self.sock.fileno() >= 0:
            self.reactor.change(self.sock.fileno(), READ)

    def _accept(self, events: int) -> None:
        for _ in range(_ACCEPTS_AT_A_TIME):
            try:
                sock, address = self.sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                log.debug("a connection was gone before it was accepted: %s", error)
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._pause()
                return
            try:
                if not is_own_user(sock):
                    _other_users_log.write(
                        logging.WARNING, "refused a connection of another user of this machine"
                    )
                    sock.close()
                    continue
                tune(sock, self.lost_after_s)
            except OSError as error:
                log.debug("a connection was gone when it was accepted: %s", error)
                sock.close()
                continue
            self._begin(sock, address)
            if self.sock.fileno() < 0:
                return

    def _begin(self, sock: socket.socket, address: object) -> None:
        """Start the handshake with a client that was just accepted."""
        core = self.make_core()
        number = id(core)

        def admitted(sock: socket.socket) -> None:
            del self._strangers[number]
            self.on_admitted(sock, core)

        def refused(error: Exception) -> None:
            del self._strangers[number]
            level = (
                logging.WARNING
                if isinstance(error, AuthenticationError | ProtocolError)
                else logging.DEBUG
            )
            where = address or "this machine"
            _refusals_log.write(
                level, "refused a connection from %s: %s: %s", where, type(error).__name__, error
            )

        admission = Admission(
            self.reactor, sock, core, self.handshake_s, admitted, refused, self.tls
        )
        self._strangers[number] = admission
        if len(self._strangers) > self.max_strangers:
            oldest = next(iter(self._strangers.values()))
            oldest.refuse(ConnectionError("too many strangers wait; the oldest goes"))
