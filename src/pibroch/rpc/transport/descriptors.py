"""Descriptors beside bytes on a Unix socket: of memory that both processes map."""

from __future__ import annotations

import array
import socket
from collections.abc import Sequence
from typing import Protocol

MAX_DESCRIPTORS = 64
_ANCILLARY_BYTES = socket.CMSG_SPACE(4 * MAX_DESCRIPTORS)


class HasDescriptor(Protocol):
    """Something with a descriptor that goes to the peer and is closed here then."""

    fd: int

    def close_fd(self) -> None:
        """Close it."""


def send_descriptors(
    sock: socket.socket, view: memoryview, descriptors: Sequence[HasDescriptor]
) -> int:
    """Send descriptors with the first byte of ``view``, and close them here.

    How many bytes were sent.
    """
    rights = array.array("i", [each.fd for each in descriptors])
    sent = sock.sendmsg([view], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    for each in descriptors:
        each.close_fd()
    return sent


def receive_descriptors(sock: socket.socket, target: memoryview) -> tuple[int, list[int], bool]:
    """Receive into ``target``: how many bytes, the descriptors that came with them, and whether some were cut off."""
    found = array.array("i")
    num_bytes, ancillary, flags, _ = sock.recvmsg_into(
        [target], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % 4])
    return num_bytes, found.tolist(), bool(flags & socket.MSG_CTRUNC)
