"""Sockets: where a rank listens, reading until memory is full, and hosts that vanish."""

from __future__ import annotations

import os
import socket

from pibroch.host import is_one_machine


def listen() -> socket.socket:
    """A server on a free port of loopback, or of the interface of ``MASTER_ADDR``.

    Loopback is taken where all ranks are on this machine.

    That is the one which it names, or, where it is another machine's, the one that leads to it.
    """
    host = "127.0.0.1" if is_one_machine() else _own_address(os.environ["MASTER_ADDR"])
    return socket.create_server((host, 0), backlog=512)


def _own_address(host: str) -> str:
    """The IPv4 address under which this machine is ``host``, or is seen from it."""
    address = str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            probe.connect((address, 9))  # sends nothing
        return str(probe.getsockname()[0])


def fill(link: socket.socket, room: memoryview) -> None:
    """Read bytes until ``room`` is full. Blocks; the socket's timeout holds for each piece.

    Raises:
        ConnectionError: when the stream ends before.
        OSError: when it breaks, or nothing comes in time.
    """
    place = 0
    while place < len(room):
        num_bytes = link.recv_into(room[place:])
        if num_bytes == 0:
            raise ConnectionError("the stream ended")
        place += num_bytes


def notice_lost_host(sock: socket.socket, lost_after_s: float) -> None:
    """Let the kernel close a TCP connection after so long without a sign of the other host.

    Small frames go out at once. Nothing happens to other sockets.
    """
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": 1,
        "TCP_KEEPINTVL": 1,
        "TCP_KEEPCNT": max(1, round(lost_after_s) - 1),
        "TCP_USER_TIMEOUT": int(lost_after_s * 1000),
    }
    for name, value in options.items():
        if hasattr(socket, name):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
