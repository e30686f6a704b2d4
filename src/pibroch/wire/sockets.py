"""Sockets: where a rank listens, reading until memory is full, and whose the other end is."""

from __future__ import annotations

import os
import socket
import struct

from pibroch.host import is_one_machine

_CREDENTIALS = struct.Struct("3i")


def listen() -> socket.socket:
    """A server on a free port of :func:`own_address`."""
    return socket.create_server((own_address(), 0), backlog=512)


def own_address() -> str:
    """Where other ranks reach this machine: the interface of ``MASTER_ADDR``, or loopback.

    Loopback where all ranks are on this machine. The interface is the one which ``MASTER_ADDR``
    names, or, where it is another machine's, the one that leads to it.
    """
    if is_one_machine():
        return "127.0.0.1"
    host = os.environ["MASTER_ADDR"]
    address = str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            probe.connect((address, 9))  # sends nothing
        return str(probe.getsockname()[0])


def fill(link: socket.socket, room: memoryview) -> None:
    """Read bytes until ``room``, one byte an item, is full. Blocks.

    Raises:
        ConnectionError: when the stream ends before.
        OSError: when it breaks, or nothing comes within the socket's timeout.
    """
    place = 0
    while place < len(room):
        num_bytes = link.recv_into(room[place:])
        if num_bytes == 0:
            raise ConnectionError("the stream ended")
        place += num_bytes


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
