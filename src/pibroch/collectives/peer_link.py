"""A link between two failure detectors: a socket that carries what they tell each other.

Its end says that the other one is gone.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress

import msgspec

from pibroch.errors import RankFailedError
from pibroch.wire.alive import is_silence, notice_lost_host

MAX_LINE_BYTES = 1 << 14
SEND_TIMEOUT_S = 1.0


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """The sender is in this step from now on."""

    step: int


class RankFailure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """What became of a rank.

    Attributes:
        rank, step, reason: as in :class:`RankFailedError`.
        exit_code: with which its process ends.
        stopped: whether it was told to stop, and did not fail.
        is_loss: see :class:`PibrochError`.
        is_host_lost: whether collectives with it wait in vain, as nobody ends its connections.
    """

    rank: int
    step: int | None
    reason: str
    exit_code: int = 1
    stopped: bool = False
    is_loss: bool = False
    is_host_lost: bool = False

    def error(self) -> RankFailedError:
        """The error that this is on all other ranks."""
        error = RankFailedError(self.rank, self.step, self.reason)
        error.exit_code = self.exit_code
        error.is_loss = self.is_loss
        return error


class RollCall(msgspec.Struct, frozen=True, array_like=True, tag="roll"):
    """Answered by :class:`Present`, by a process that is neither stopped nor hangs."""


class Present(msgspec.Struct, frozen=True, array_like=True, tag="there"):
    """The sender is there."""


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """The sender says nothing more, and has not failed."""


Message = Step | RankFailure | RollCall | Present | Ended
_decoder = msgspec.json.Decoder(Message)


class PeerLink:
    """Messages, one a line, over a connected TCP socket, which the link then owns."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = bytearray()
        self._lock = threading.Lock()
        self.is_host_lost = False
        connection.settimeout(SEND_TIMEOUT_S)
        notice_lost_host(connection)
        os.set_inheritable(connection.fileno(), False)

    def fileno(self) -> int:
        """The socket's descriptor, by which selectors take a link."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send a message, from any thread, which perhaps nobody hears."""
        with suppress(OSError), self._lock:
            self._socket.sendall(msgspec.json.encode(message) + b"\n")

    def receive(self) -> list[Message] | None:
        """Messages that have come, waiting up to a second for some.

        ``None`` when the other end is gone; ``is_host_lost`` then says how.

        Raises:
            ValueError: for what is no message.
        """
        try:
            data = self._socket.recv(1 << 16)
        except OSError as error:
            self.is_host_lost = is_silence(error)
            is_too_early = isinstance(error, TimeoutError) and not self.is_host_lost
            return [] if is_too_early else None
        if not data:
            return None
        self._buffer += data
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = bytearray(rest)
        if max(map(len, [*lines, rest])) > MAX_LINE_BYTES:
            raise ValueError(f"a line of more than {MAX_LINE_BYTES} bytes")
        try:
            return [_decoder.decode(line) for line in lines]
        except msgspec.DecodeError as error:
            raise ValueError(f"a line that is no message: {error}") from error

    def close(self) -> None:
        """Let go of the socket."""
        self._socket.close()
