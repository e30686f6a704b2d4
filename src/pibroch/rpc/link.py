"""From an address to an admitted socket: dialling, listening, TLS and the handshake, none of which blocks."""

from __future__ import annotations

import errno
import logging
import os
import random
import socket
import ssl
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from pibroch.errors import AuthenticationError, ProtocolError, RpcError
from pibroch.rpc.handshake import Client, Server
from pibroch.rpc.reactor import READ, WRITE, Reactor

log = logging.getLogger(__name__)

_MAX_READ_BYTES = 4096
_BACKLOG = 512
_PAUSE_S = 0.1
_ACCEPTS_AT_A_TIME = 64
_LINES = 20  # about refused connections are logged at once,
_LINES_PER_S = 1.0  # and then so many; how many were left out is said in the next one
_CREDENTIALS = struct.Struct("3i")  # of a Unix socket's other end: process, user, group
_REDIAL_S = (0.002, 0.1)  # how long to wait before a full queue is tried again, at first and at most


class BoundedLog:
    """Lines of one sort, at a bounded rate: who causes them may cause any number.

    >>> lines = BoundedLog(at_once=1, per_s=1e-9)
    >>> lines.wants_one(0.0), lines.wants_one(1.0), lines.num_left_out
    (True, False, 1)
    """

    def __init__(self, at_once: int = _LINES, per_s: float = _LINES_PER_S) -> None:
        self._at_once, self._per_s = at_once, per_s
        self._allowance, self._last = float(at_once), 0.0
        self.num_left_out = 0

    def wants_one(self, now: float) -> bool:
        """Whether one more is to be written at this time (monotonic, in seconds)."""
        self._allowance = min(self._at_once, self._allowance + (now - self._last) * self._per_s)
        self._last = now
        if self._allowance < 1:
            self.num_left_out += 1
            return False
        self._allowance -= 1
        return True

    def write(self, level: int, text: str, *args: object) -> None:
        """Log it, unless there were too many."""
        if log.isEnabledFor(level) and self.wants_one(time.monotonic()):
            left_out, self.num_left_out = self.num_left_out, 0
            log.log(
                level, text + (" (and %d more before it)" if left_out else ""), *args, *([left_out] if left_out else [])
            )


_refusals, _foreigners = BoundedLog(), BoundedLog()


@dataclass(frozen=True, slots=True)
class Address:
    """Where a worker listens.

    Attributes:
        machine: boot id and network namespace: workers of the same machine use the Unix socket.
        unix: its abstract name, ``None`` when there is none.
        host: for TCP.
        port: for TCP.
    """

    machine: str
    unix: str | None
    host: str
    port: int


def this_machine() -> str:
    """What two workers have in common that can share memory: the kernel's boot and the network namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{boot.read().strip()}/{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def tune(sock: socket.socket, lost_after_s: float) -> None:
    """No delay for small frames; a silent host is given up by the kernel after ``lost_after_s``."""
    sock.setblocking(False)
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, round(lost_after_s) - 1))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(lost_after_s * 1000))


class Admission:
    """One handshake under way (all on the loop).

    Args:
        reactor: the loop.
        sock: connected or connecting, non-blocking.
        core: our side of the handshake.
        timeout_s: for all of it.
        on_admitted: gets the socket; what was received after the handshake is in ``core.surplus``.
        on_refused: gets the reason; the socket is closed.
        tls: wraps the socket first.
    """

    def __init__(
        self,
        reactor: Reactor,
        sock: socket.socket,
        core: Client | Server,
        timeout_s: float,
        on_admitted: Callable[[socket.socket], None],
        on_refused: Callable[[Exception], None],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._reactor, self._sock, self._core = reactor, sock, core
        self._on_admitted, self._on_refused = on_admitted, on_refused
        self._tls, self._is_connecting = tls, isinstance(core, Client)
        self._out = bytearray(core.start())
        self._is_over = False
        reactor.watch(sock.fileno(), READ | WRITE, self._on_events)
        reactor.call_at(time.monotonic() + timeout_s, self._expire)

    def refuse(self, error: Exception) -> None:
        """Give up."""
        if not self._is_over:
            self._is_over = True
            self._reactor.forget(self._sock.fileno())
            self._sock.close()
            self._on_refused(error)

    def _expire(self) -> None:
        self.refuse(TimeoutError("no handshake in time"))

    def _on_events(self, events: int) -> None:
        try:
            self._advance()
        except (BlockingIOError, ssl.SSLWantReadError):
            self._reactor.change(self._sock.fileno(), READ | (WRITE if self._out else 0))
        except ssl.SSLWantWriteError:
            self._reactor.change(self._sock.fileno(), READ | WRITE)
        except (OSError, RpcError) as error:
            self._say_why()
            self.refuse(error)

    def _advance(self) -> None:
        if self._is_connecting:
            self._check_connected()
        if self._tls is not None:
            self._wrap()
        if isinstance(self._sock, ssl.SSLSocket):
            self._sock.do_handshake()
        while not self._is_over:
            if self._out:
                del self._out[: self._sock.send(self._out)]
            if self._core.done and not self._out:
                self._admit()
                return
            data = self._sock.recv(_MAX_READ_BYTES)
            if not data:
                raise ConnectionError("the other side closed the connection during the handshake")
            self._out += self._core.receive(data)

    def _check_connected(self) -> None:
        failure = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failure:
            raise OSError(failure, os.strerror(failure))
        self._is_connecting = False

    def _wrap(self) -> None:
        assert self._tls is not None
        context, self._tls = self._tls, None
        fd = self._sock.fileno()
        self._reactor.forget(fd)
        self._sock = context.wrap_socket(
            self._sock, server_side=isinstance(self._core, Server), do_handshake_on_connect=False
        )
        self._reactor.watch(self._sock.fileno(), READ | WRITE, self._on_events)

    def _admit(self) -> None:
        self._is_over = True
        self._reactor.forget(self._sock.fileno())
        on_admitted = self._on_admitted
        self._on_admitted = self._on_refused = (
            _nothing  # the timer still knows this object, and must not keep what they hold
        )
        on_admitted(self._sock)

    def _say_why(self) -> None:
        """A server's last word to whom it refuses."""
        refusal = getattr(self._core, "refusal", b"")
        if refusal and not self._is_over:
            try:
                self._sock.send(refusal)
            except OSError as error:
                log.debug("could not say why a connection is refused: %s", error)


def _nothing(_: object) -> None:
    """Do nothing."""


def dial(address: Address, here: str, lost_after_s: float) -> socket.socket:
    """A socket that is being connected: over the Unix socket on the same machine, else TCP.

    Raises:
        OSError: when it is clear at once that nobody is there.
    """
    if address.unix is not None and address.machine == here:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        target: str | tuple[str, int] = "\0" + address.unix
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


class Dialling:
    """Dials until there is a place in the queue of the other side's socket, which others may have filled (on the loop).

    Args:
        reactor: the loop.
        make_socket: dials once (``dial``).
        timeout_s: for all of it.
        on_dialled: gets the socket.
        on_failed: gets the error.
    """

    def __init__(
        self,
        reactor: Reactor,
        make_socket: Callable[[], socket.socket],
        timeout_s: float,
        on_dialled: Callable[[socket.socket], None],
        on_failed: Callable[[OSError], None],
    ) -> None:
        self._reactor, self._make_socket = reactor, make_socket
        self._on_dialled, self._on_failed = on_dialled, on_failed
        self._deadline, self._pause_s = time.monotonic() + timeout_s, _REDIAL_S[0]
        self._dial()

    def _dial(self) -> None:
        try:
            sock = self._make_socket()
        except OSError as error:
            now = time.monotonic()
            if error.errno != errno.EAGAIN or now > self._deadline:
                self._on_failed(error)
                return
            self._reactor.call_at(now + self._pause_s * random.uniform(0.5, 1.5), self._dial)
            self._pause_s = min(2 * self._pause_s, _REDIAL_S[1])
            return
        self._on_dialled(sock)


def is_foreign(sock: socket.socket) -> bool:
    """Whether a Unix socket's other end belongs to another user of this machine (the superuser is none)."""
    if sock.family != socket.AF_UNIX:
        return False
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    return user not in (os.geteuid(), 0)


class Listener:
    """Accepts connections of strangers, at most so many at a time, and admits those that know the secret (on the loop).

    At a Unix socket, processes of other users are turned away before anything else.

    Args:
        make_core: our side of a new handshake.
        on_admitted: gets socket and core of each that passed.
    """

    def __init__(
        self,
        reactor: Reactor,
        sock: socket.socket,
        make_core: Callable[[], Server],
        on_admitted: Callable[[socket.socket, Server], None],
        *,
        max_strangers: int,
        handshake_s: float,
        lost_after_s: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._reactor, self._sock = reactor, sock
        self._make_core, self._on_admitted = make_core, on_admitted
        self._max_strangers, self._handshake_s, self._lost_after_s, self._tls = (
            max_strangers,
            handshake_s,
            lost_after_s,
            tls,
        )
        self._strangers: dict[int, Admission] = {}  # oldest first
        sock.setblocking(False)
        sock.listen(_BACKLOG)
        reactor.call_soon(lambda: reactor.watch(sock.fileno(), READ, self._accept))

    def close(self) -> None:
        """Accept nobody any more (on the loop)."""
        self._reactor.forget(self._sock.fileno())
        self._sock.close()
        for admission in tuple(self._strangers.values()):
            admission.refuse(ConnectionError("this worker leaves"))

    def _pause(self) -> None:
        """Without descriptors the socket would stay readable and the loop would spin: a stranger goes, the next ones wait."""
        if self._strangers:
            next(iter(self._strangers.values())).refuse(ConnectionError("no descriptors are left; the oldest goes"))
        self._reactor.change(self._sock.fileno(), 0)
        self._reactor.call_at(time.monotonic() + _PAUSE_S, self._resume)

    def _resume(self) -> None:
        if self._sock.fileno() >= 0:
            self._reactor.change(self._sock.fileno(), READ)

    def _accept(self, events: int) -> None:
        for _ in range(_ACCEPTS_AT_A_TIME):
            try:
                sock, address = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                log.debug("a connection was gone before it was accepted: %s", error)
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._pause()
                return
            try:
                if is_foreign(sock):
                    _foreigners.write(logging.WARNING, "refused a connection of another user of this machine")
                    sock.close()
                    continue
                tune(sock, self._lost_after_s)
            except OSError as error:
                log.debug("a connection was gone when it was accepted: %s", error)
                sock.close()
                continue
            self._begin(sock, address)
            if self._sock.fileno() < 0:
                return

    def _begin(self, sock: socket.socket, address: object) -> None:
        """A handshake with a stranger."""
        core = self._make_core()
        number = id(core)

        def admitted(sock: socket.socket) -> None:
            del self._strangers[number]
            self._on_admitted(sock, core)

        def refused(error: Exception) -> None:
            del self._strangers[number]
            level = logging.WARNING if isinstance(error, AuthenticationError | ProtocolError) else logging.DEBUG
            where = address or "this machine"
            _refusals.write(level, "refused a connection from %s: %s: %s", where, type(error).__name__, error)

        admission = Admission(self._reactor, sock, core, self._handshake_s, admitted, refused, self._tls)
        self._strangers[number] = admission
        if len(self._strangers) > self._max_strangers:
            oldest = next(iter(self._strangers.values()))
            oldest.refuse(ConnectionError("too many strangers wait; the oldest goes"))
