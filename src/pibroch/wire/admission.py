"""How ranks let each other in.

Both ends of a connection prove that they know the run's key, and which rank they are.

The handshake is that of the tensor RPC. The name that a rank is called by holds the address that it
listens at, so a proof that somebody in between passes on is worth nothing. No key travels through
torch's store, unless ranks of several machines were started without a secret.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache

from pibroch.errors import ConfigError, PibrochError
from pibroch.host import is_one_machine
from pibroch.wire.handshake import Client, Server
from pibroch.wire.handshake_messages import Identity, Purpose
from pibroch.wire.secret import SECRET_FILE_VARIABLE, SECRET_VARIABLE, find_secret

HELLO_TIMEOUT_S = 5.0
"""For a caller to prove itself; meanwhile others are let in."""
_MOST_CALLERS = 256
_CHUNK_BYTES = 2048
_log = logging.getLogger(__name__)
_CREDENTIALS = struct.Struct("3i")


def key_of_run() -> bytes | None:
    """A key that only the ranks of this run know.

    ``None`` where several machines were started without a secret.

    Raises:
        ConfigError: for a secret that cannot be used.
    """
    is_local = is_one_machine()
    if not is_local and not any(map(os.environ.get, (SECRET_VARIABLE, SECRET_FILE_VARIABLE))):
        if os.environ.get("RANK", "0") == "0":
            _warn(SECRET_VARIABLE)
        return None
    # torchrun's count of restarts is none of it: it may differ from machine to machine
    job = "/".join(os.environ.get(name, "") for name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID"))
    secret = find_secret(None, os.environ, local=is_local, key="ranks")
    return hmac.new(secret, f"pibroch ranks {job}".encode(), hashlib.sha256).digest()


@cache
def _warn(variable: str) -> None:
    """Once a process."""
    _log.warning(
        "ranks on several machines without a secret: whoever reaches their ports can take a rank's"
        " place; put the same one into %s on all of them (docs/distributed.md)",
        variable,
    )


def published_key(key: bytes | None) -> str:
    """What rank 0 says where all can read it: nothing, or a random key where there is no secret."""
    return secrets.token_hex(32) if key is None else ""


def agreed_key(key: bytes | None, published: str) -> bytes:
    """A rank's own key, or the published one.

    Raises:
        ConfigError: for a rank without a secret where rank 0 has one.
    """
    if key is None and not published:
        raise ConfigError(
            "a rank without a secret, where rank 0 has one",
            "the same secret on all machines",
            "set PIBROCH_RPC_SECRET or PIBROCH_RPC_SECRET_FILE on all of them",
        )
    return bytes.fromhex(published) if key is None else key


def introduce(link: socket.socket, key: bytes, rank: int, other: int) -> None:
    """Prove to the rank at the other end who calls, and have it prove itself.

    Blocks; the socket's timeout holds.

    Raises:
        AuthenticationError: when it is another.
        OSError: when it hangs up, or does not answer.
    """
    expected = _name(other, link.getpeername())
    side = Client(key, Identity(f"rank {rank}", rank, 0), expected, Purpose(0))
    while not side.done:
        _receive(link, side)


def admit(
    servers: Sequence[socket.socket],
    key: bytes,
    rank: int,
    expected: Iterable[int],
    deadline: float,
) -> dict[int, socket.socket]:
    """The blocking sockets of these ranks, once all have called.

    Strangers are turned away, and hold up nobody.

    Args:
        servers: listening.
        key: of the run.
        rank: of this process.
        expected: who calls.
        deadline: by the monotonic clock.

    Raises:
        TimeoutError: names those that did not come.
    """
    links: dict[int, socket.socket] = {}
    absent = set(expected)
    with _Callers(servers, key, rank) as callers:
        while absent:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                for link in links.values():
                    link.close()
                raise TimeoutError(f"ranks {sorted(absent)} did not come in time")
            for caller, link in callers.proved(min(remaining, HELLO_TIMEOUT_S)):
                if caller in absent:
                    absent.remove(caller)
                    link.settimeout(None)
                    links[caller] = link
                else:
                    link.close()
    return links


class _Callers:
    """Connections that have not proved yet who they are, the oldest first."""

    def __init__(self, servers: Sequence[socket.socket], key: bytes, rank: int) -> None:
        self._key = key
        self._rank = rank
        self._pending: dict[socket.socket, tuple[Server, float]] = {}
        self._selector = selectors.DefaultSelector()
        for server in servers:
            self._selector.register(server, selectors.EVENT_READ, server)

    def __enter__(self) -> _Callers:
        return self

    def __exit__(self, *_: object) -> None:
        for link in list(self._pending):
            self._drop(link)
        self._selector.close()

    def proved(self, timeout_s: float) -> Iterable[tuple[int, socket.socket]]:
        """Those that have proved themselves, after a wait for something to happen."""
        for key, _ in self._selector.select(timeout_s):
            link = key.fileobj
            assert isinstance(link, socket.socket)
            if key.data is not None:
                self._accept(link)
                continue
            if link not in self._pending:  # it made room for another a moment ago
                continue
            side = self._pending[link][0]
            try:
                _receive(link, side)
            except (OSError, PibrochError):
                with suppress(OSError):
                    link.send(side.refusal)
                self._drop(link)
                continue
            if side.done:
                self._selector.unregister(link)
                del self._pending[link]
                yield side.peer.id, link
        now = time.monotonic()
        for link, (_, until) in list(self._pending.items()):
            if until < now:
                self._drop(link)

    def _accept(self, server: socket.socket) -> None:
        link = server.accept()[0]
        # any user of this host sees a Unix socket's name: only this one, or root, is let in
        if not is_own_user(link):
            link.close()
            return
        if len(self._pending) == _MOST_CALLERS:
            self._drop(next(iter(self._pending)))
        side = Server(self._key, Identity(_name(self._rank, server.getsockname()), self._rank, 0))
        self._pending[link] = side, time.monotonic() + HELLO_TIMEOUT_S
        self._selector.register(link, selectors.EVENT_READ)
        link.settimeout(HELLO_TIMEOUT_S)
        try:
            link.sendall(side.start())
        except OSError:
            self._drop(link)

    def _drop(self, link: socket.socket) -> None:
        self._selector.unregister(link)
        del self._pending[link]
        link.close()


def is_own_user(link: socket.socket) -> bool:
    """Whether the other end of a Unix socket is a process of this user, or of root.

    True of other sockets.
    """
    return link.family != socket.AF_UNIX or credentials(link)[1] in (os.geteuid(), 0)


def credentials(link: socket.socket) -> tuple[int, int, int]:
    """Process, user and group at the other end of a Unix socket.

    The process is 0 when it is in another container.
    """
    size = _CREDENTIALS.size
    process, user, group = _CREDENTIALS.unpack(
        link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    return process, user, group


def _receive(link: socket.socket, side: Client | Server) -> None:
    """Take what has arrived of a handshake, and answer.

    What the other end sends after it stays in the socket.
    """
    data = link.recv(_CHUNK_BYTES, socket.MSG_PEEK)
    if not data:
        raise ConnectionError("it hung up before it had proved who it is")
    answer = side.receive(data)
    link.recv(len(data) - len(side.surplus))
    if answer:
        link.sendall(answer)


def _name(rank: int, address: object) -> str:
    return f"rank {rank} at {address!r}"
