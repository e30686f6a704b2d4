"""Sockets: where a rank listens, reading until memory is full, and whose the other end is."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable

from pibroch.host import is_one_machine

_CREDENTIALS = struct.Struct("3i")


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


def give_up() -> None:
    """What to do at first when a socket's time is over.

    Raises:
        TimeoutError: always.
    """
    raise TimeoutError("timed out")


def fill(link: socket.socket, room: memoryview, on_timeout: Callable[[], None] = give_up) -> None:
    """Read bytes until ``room`` is full. Blocks.

    Args:
        link: connected; its timeout holds for each piece.
        room: one byte an item.
        on_timeout: called then; where it raises nothing, this waits again.

    Raises:
        ConnectionError: when the stream ends before.
        OSError: when it breaks, or nothing comes in time.
    """
    place = 0
    while place < len(room):
        try:
            num_bytes = link.recv_into(room[place:])
        except TimeoutError as error:
            if error.errno is not None:  # the system's, of a connection that has ended
                raise
            on_timeout()
            continue
        if num_bytes == 0:
            raise ConnectionError("the stream ended")
        place += num_bytes


def send_all(
    link: socket.socket, data: memoryview, on_timeout: Callable[[], None] = give_up
) -> None:
    """Send bytes. Blocks; arguments and errors are those of :func:`fill`."""
    place = 0
    while place < len(data):
        try:
            place += link.send(data[place:])
        except TimeoutError as error:
            if error.errno is not None:
                raise
            on_timeout()


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
