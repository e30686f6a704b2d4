"""File descriptors that come over a Unix socket (``SCM_RIGHTS``), of memory that both sides map."""

from __future__ import annotations

import array
import socket

MAX_DESCRIPTORS = 64
_ANCILLARY_BYTES = socket.CMSG_SPACE(4 * MAX_DESCRIPTORS)


def receive_descriptors(sock: socket.socket, target: memoryview) -> tuple[int, list[int], bool]:
    """Receive into ``target``.

    Returns:
        How many bytes were received, the descriptors beside them, and whether some of these were
        cut off.
    """
    descriptors = array.array("i")
    num_bytes, ancillary, flags, _ = sock.recvmsg_into(
        [target], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % 4])
    return num_bytes, descriptors.tolist(), bool(flags & socket.MSG_CTRUNC)
