"""The messages of the handshake as bytes, and what both sides share (pure).

See docs/wire-format.md.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass
from enum import IntEnum

from pibroch.errors import ProtocolError

MAGIC = b"\x89PBRPC\r\n"  # not text, and damaged by whatever changes line ends
VERSIONS = (3, 3)  # lowest and highest version of the wire format that is spoken here
MAX_MESSAGE_BYTES = 1024
MAX_NAME_BYTES = 255

IDLE = 0xFFFF
"""The stream of a connection on which nothing is sent: its end tells of a lost host."""
NONCE_BYTES = 32
MAC_BYTES = 32
HELLO = struct.Struct(f"<8sHH{NONCE_BYTES}s")  # magic, lowest version, highest version, nonce
_LENGTH = struct.Struct("<H")
# three versions, nonce, id, incarnation, connection, stream
CLIENT = struct.Struct(f"<HHH{NONCE_BYTES}sQQQH")
REPLY = struct.Struct("<BQQ")  # code, id, incarnation
CLIENT_LABEL = b"pibroch rpc client proof\0"
SERVER_LABEL = b"pibroch rpc server proof\0"


class ReplyCode(IntEnum):
    """The first byte of the server's reply."""

    ACCEPTED = 0
    WRONG_SECRET = 1
    WRONG_VERSION = 2
    WRONG_WORKER = 3
    MALFORMED = 4


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a worker is, as it announces itself in the handshake.

    Attributes:
        name: 1 to 255 bytes of UTF-8.
        id: below 2**64.
        incarnation: random, below 2**64; another one each time the worker starts.
    """

    name: str
    id: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Purpose:
    """What a connection is for.

    Attributes:
        connection_id: chosen at random by the dialler, below 2**64, shared by all streams of one
            connection.
        stream: 0 for messages, from 1 on for bulk data, or :data:`IDLE`.
    """

    connection_id: int
    stream: int = 0


class Side:
    """What both sides share: a buffer that never holds more than one message.

    Args:
        secret: the job's.
        me: this worker.
        versions: lowest and highest that this side speaks.
    """

    def __init__(self, secret: bytes, me: Identity, versions: tuple[int, int]) -> None:
        encoded_name(me.name)
        self._secret = secret
        self._me = me
        self._versions = versions
        self.version = 0  # 0 until both have agreed on one
        self._buffer = bytearray()
        self._transcript = b""
        self._peer: Identity | None = None
        self.surplus = b""

    @property
    def done(self) -> bool:
        """Whether the other side has proved itself."""
        return self._peer is not None

    @property
    def peer(self) -> Identity:
        """The other side, once ``done``."""
        assert self._peer is not None, "asked for the peer before the handshake was done"
        return self._peer

    def receive(self, data: bytes) -> bytes:
        """Handle any number of received bytes; returns what to send.

        Raises:
            AuthenticationError: the other side refused, or does not know the secret, repeats a
                handshake, is or wants another worker, or speaks another version.
            ProtocolError: these are not the bytes of a handshake.
        """
        if self.done:
            self.surplus += data
            return b""
        self._buffer += data
        return self._advance()

    def _advance(self) -> bytes:
        """Handle what is in the buffer; returns what to send."""
        raise NotImplementedError

    def _proof(self, label: bytes, body: bytes) -> bytes:
        return hmac.digest(self._secret, label + self._transcript + body, "sha256")

    def _message(self) -> bytes | None:
        """The buffered message, or ``None`` while it is incomplete.

        Bytes after it become the surplus.
        """
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > MAX_MESSAGE_BYTES:
            raise ProtocolError(
                f"a handshake message of {length} bytes", f"at most {MAX_MESSAGE_BYTES}"
            )
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        self.surplus = bytes(self._buffer[end:])
        message = bytes(self._buffer[_LENGTH.size : end])
        self._buffer.clear()
        return message


def common_version(own: tuple[int, int], others: tuple[int, int]) -> int:
    """The highest version in both ranges, 0 when there is none."""
    highest = min(own[1], others[1])
    return highest if highest >= max(own[0], others[0]) else 0


def range_of(versions: tuple[int, int]) -> str:
    """A range of versions in words, for error messages."""
    return f"{versions[0]} to {versions[1]}"


def encoded_name(name: str) -> bytes:
    """A worker's name in UTF-8; a ``ProtocolError`` for one that is empty or too long."""
    encoded = name.encode()
    if not 0 < len(encoded) <= MAX_NAME_BYTES:
        raise ProtocolError(f"a worker's name of {len(encoded)} bytes", f"1 to {MAX_NAME_BYTES}")
    return encoded


def framed(message: bytes) -> bytes:
    """A message with its length before it."""
    return _LENGTH.pack(len(message)) + message


def packed_name(name: bytes) -> bytes:
    """A name with its length before it, in one byte."""
    return bytes([len(name)]) + name


def unpacked_name(data: bytes) -> tuple[str, bytes]:
    """Split off a name that was packed by ``packed_name``: the name, and the bytes after it."""
    length = data[0] if data else 0
    if not length or len(data) < 1 + length:
        raise ProtocolError(
            "a name that is empty or cut off", "its length in one byte, then that many bytes"
        )
    try:
        return data[1 : 1 + length].decode(), data[1 + length :]
    except UnicodeDecodeError as error:
        raise ProtocolError("a name that is no text", "UTF-8") from error
