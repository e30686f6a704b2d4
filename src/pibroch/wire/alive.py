"""What has become of another process: gone, stopped, or alive; and of a host that was lost.

A lost host says nothing, and neither does a process that is stopped. Only the host's kernel tells
them apart: it answers for its processes, whatever they do. So one connection to a process on
another host carries next to nothing (:func:`notice_lost_host`); the kernels ask each other on it
every second, and its end means that the host is lost. All else between the two may wait for as
long as that connection lives (:func:`wait_for_reader`).
"""

from __future__ import annotations

import errno
import select
import socket
from pathlib import Path

from pibroch.wire.sockets import credentials

LOST_HOST_S = 4.0
"""After so long without a sign a host counts as lost; a process that ends is noticed at once."""
_SILENCE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_TCP_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def state_behind(link: socket.socket) -> str:
    """The state of the process at the other end of a socket, as :func:`state_of` says it.

    Empty when it has hung up; ``?`` of one that does not say so and is on another host.
    """
    if has_hung_up(link):
        return ""
    return state_of(credentials(link)[0]) if link.family == socket.AF_UNIX else "?"


def state_of(process: int) -> str:
    """The state of a process as the system has it: ``T`` when stopped, empty when gone or ended.

    Of 0, a process that cannot be seen from here, it says nothing: ``?``.
    """
    if process == 0:
        return "?"
    try:
        # behind the last bracket: a program's name, which comes before, may hold brackets and
        # blanks
        state = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""
    return "" if state in ("Z", "X") else state


def has_hung_up(link: socket.socket) -> bool:
    """Whether the other end of a socket is gone."""
    poll = select.poll()
    poll.register(link, select.POLLRDHUP)
    return bool(poll.poll(0))  # which tells of that, of errors, and of nothing else


def notice_lost_host(sock: socket.socket, lost_after_s: float = LOST_HOST_S) -> None:
    """Let the kernel end a TCP connection after so long without a sign of the other host.

    For a connection that carries little: who does not read for a while, as when it is stopped, must
    not have so much before it that it takes no more, since that counts as silence here. Small
    messages go out at once. Nothing happens to other sockets.
    """
    _set(
        sock,
        TCP_NODELAY=1,
        TCP_KEEPIDLE=1,
        TCP_KEEPINTVL=1,
        TCP_KEEPCNT=max(1, round(lost_after_s) - 1),
        TCP_USER_TIMEOUT=int(lost_after_s * 1000),
    )


class HostWatch:
    """Which hosts were lost: asked by rank, of a connection to each on which nothing is sent.

    Args:
        links: TCP, by the rank at the other end; they belong to the watch from now on.
    """

    def __init__(self, links: dict[int, socket.socket]) -> None:
        self._links = links
        self._lost: set[int] = set()
        for link in links.values():
            notice_lost_host(link)

    def is_lost(self, rank: int) -> bool:
        """Whether a rank's host was lost; false of ranks without a connection. Does not wait."""
        link = self._links.get(rank)
        # the system tells of an error once
        if link is not None and link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _SILENCE:
            self._lost.add(rank)
        return rank in self._lost

    def close(self) -> None:
        """Close the connections. Once is enough."""
        for link in self._links.values():
            link.close()
        self._links = {}


def is_silence(error: OSError) -> bool:
    """Whether a connection ended because its other host gave no sign."""
    return error.errno in _SILENCE


def wait_for_reader(sock: socket.socket) -> None:
    """Wait again for who takes no more, where another connection tells of a lost host."""
    _set(sock, TCP_USER_TIMEOUT=0)


def _set(sock: socket.socket, **options: int) -> None:
    if sock.family not in _TCP_FAMILIES:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        if hasattr(socket, name):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
