"""How ranks let each other in.

Both ends of a connection prove that they know the run's key, and which rank they are.

The handshake is that of the tensor RPC. The name that a rank is called by holds the address that it
listens at, so a proof that somebody in between passes on is worth nothing. No key travels through
torch's store, unless ranks of several machines were started without a secret.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import cache, partial

from pibroch.errors import ConfigError
from pibroch.host import is_one_machine
from pibroch.wire.admit import Listener
from pibroch.wire.handshake import Client, Server
from pibroch.wire.handshake_messages import Identity, Purpose
from pibroch.wire.reactor import Reactor
from pibroch.wire.secret import SECRET_FILE_VARIABLE, SECRET_VARIABLE, find_secret

HELLO_TIMEOUT_S = 5.0
"""For a caller to prove itself; meanwhile others are let in."""
MOST_CALLERS = 256
_CHUNK_BYTES = 2048
_log = logging.getLogger(__name__)


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
    return hmac.digest(secret, f"pibroch ranks {job}".encode(), "sha256")


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


def introduce(link: socket.socket, key: bytes, rank: int, other: int, stream: int = 0) -> None:
    """Prove to the rank at the other end who calls, and have it prove itself.

    Blocks; the socket's timeout holds.

    Args:
        link: connected.
        key: of the run.
        rank: of this process.
        other: whom it calls.
        stream: which of several connections between the two this is.

    Raises:
        AuthenticationError: when it is another.
        OSError: when it hangs up, or does not answer.
    """
    expected = _name(other, link.getpeername())
    side = Client(key, Identity(f"rank {rank}", rank, 0), expected, Purpose(0, stream))
    while not side.done:
        _receive(link, side)


def admit_streams(
    servers: Sequence[socket.socket],
    key: bytes,
    rank: int,
    expected: Iterable[tuple[int, int]],
    deadline: float,
) -> dict[tuple[int, int], socket.socket]:
    """The blocking sockets of these ranks and streams, once all have called.

    Strangers are turned away, and hold up nobody.

    Args:
        servers: listening.
        key: of the run.
        rank: of this process.
        expected: who calls, and for which stream.
        deadline: by the monotonic clock.

    Raises:
        TimeoutError: names those that did not come.
    """
    links: dict[tuple[int, int], socket.socket] = {}
    absent = set(expected)

    def admitted(link: socket.socket, side: Server) -> None:
        caller = side.peer.id, side.purpose.stream
        if caller in absent and not side.surplus:
            absent.remove(caller)
            link.setblocking(True)
            links[caller] = link
        else:
            link.close()

    with Reactor("ranks", spin=False).turned_here() as reactor, ExitStack() as listening:
        for server in servers:
            me = Identity(_name(rank, server.getsockname()), rank, 0)
            listener = Listener(
                reactor,
                server.dup(),
                partial(Server, key, me),
                admitted,
                max_strangers=MOST_CALLERS,
                handshake_s=HELLO_TIMEOUT_S,
            )
            listening.callback(listener.close)
        while absent and (remaining := deadline - time.monotonic()) > 0:
            reactor.turn(remaining)
    if absent:
        for link in links.values():
            link.close()
        raise TimeoutError(f"ranks {sorted({p for p, _ in absent})} did not come in time")
    return links


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
