"""Shared memory between two processes that have a Unix socket: its descriptor goes over that."""

from __future__ import annotations

import socket
import struct

from pibroch.wire.segments import ForeignSegment, OwnSegment

_ANNOUNCEMENT = struct.Struct("qq")  # id and bytes of a segment whose descriptor comes along


def send_segment(link: socket.socket, segment: OwnSegment) -> None:
    """Let the other end map a segment.

    Raises:
        OSError: when nobody is there.
    """
    socket.send_fds(link, [_ANNOUNCEMENT.pack(segment.segment_id, segment.nbytes)], [segment.fd])


def receive_segment(link: socket.socket) -> ForeignSegment:
    """Map the next one that the other end sends. Blocks, as long as the socket's time limit allows.

    Raises:
        OSError: when nobody is there.
    """
    message, descriptors, _, _ = socket.recv_fds(link, _ANNOUNCEMENT.size, 1)
    if len(message) != _ANNOUNCEMENT.size or len(descriptors) != 1:
        raise ConnectionError("the other rank closed the connection in place of sending its memory")
    segment_id, nbytes = _ANNOUNCEMENT.unpack(message)
    return ForeignSegment.open(descriptors[0], nbytes, segment_id)
