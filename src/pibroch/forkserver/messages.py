"""What a process asks of the fork server that it is from.

One message each way at a time, descriptors beside it.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import msgspec

from pibroch.errors import ProtocolError

MAX_BYTES = 1 << 17
MAX_DESCRIPTORS = 4


class Keep(msgspec.Struct, tag=True):
    """Memory that stays when processes end. Answered by :class:`KeptDescriptor`.

    Attributes:
        key: its name; what had it before with another tag or size is forgotten.
        tag: what it is for.
        num_bytes: its size; 0 for what is there, if anything.
    """

    key: str
    tag: str
    num_bytes: int


class KeptDescriptor(msgspec.Struct, tag=True):
    """Beside it the descriptor, but where nothing is there.

    Attributes:
        num_bytes: of it; 0 for nothing.
        is_new: whether it was made just now, of zeros.
        tag: what it is for.
    """

    num_bytes: int
    is_new: bool
    tag: str


class Loaded(msgspec.Struct, tag=True):
    """Modules that processes to come should find loaded. Not answered."""

    modules: list[str]


Request = Keep | Loaded
_REQUESTS = msgspec.json.Decoder(Request)
_ANSWERS = msgspec.json.Decoder(KeptDescriptor)


def send(
    link: socket.socket, message: Request | KeptDescriptor, descriptors: Sequence[int] = ()
) -> None:
    """Send a message.

    Raises:
        OSError: when the other side is gone.
    """
    socket.send_fds(link, [msgspec.json.encode(message)], list(descriptors))


def receive_request(link: socket.socket) -> Request | None:
    """The next request; ``None`` when the other side is gone."""
    content, _ = _receive(link)
    return _REQUESTS.decode(content) if content else None


def receive_answer(link: socket.socket) -> tuple[KeptDescriptor, list[int]]:
    """The answer to what was asked, and its descriptors.

    Raises:
        ProtocolError: when the server is gone.
    """
    content, descriptors = _receive(link)
    if not content:
        raise ProtocolError("no answer of the process that started this one", "it alive")
    return _ANSWERS.decode(content), descriptors


def _receive(link: socket.socket) -> tuple[bytes, list[int]]:
    received: tuple[bytes, list[int], int, Any] = socket.recv_fds(link, MAX_BYTES, MAX_DESCRIPTORS)
    return received[0], received[1]
