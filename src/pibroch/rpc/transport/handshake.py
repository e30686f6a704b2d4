"""Who may connect: both sides prove that they know the job's secret, before anything else is read (pure).

Three messages: the server's hello (magic, versions, nonce), the client's proof, the server's proof or refusal. A proof is an
HMAC-SHA256 over all that was said before it, so it fits one server, one client, one purpose and one pair of nonces: to repeat
or reflect it is useless. What follows is neither encrypted nor signed; where the network is not trusted, TLS goes under it.
The bytes are in docs/design/0004-wire-format.md.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import NoReturn

from pibroch.errors import AuthenticationError, PibrochError, ProtocolError

MAGIC = b"\x89PBRPC\r\n"  # not text, and damaged by whatever changes line ends
VERSIONS = (1, 1)  # lowest and highest version of the wire format that is spoken here
MAX_MESSAGE_BYTES = 1024
MAX_NAME_BYTES = 255

_NONCE_BYTES = 32
_MAC_BYTES = 32
_HELLO = struct.Struct(f"<8sHH{_NONCE_BYTES}s")  # magic, lowest version, highest version, nonce
_LENGTH = struct.Struct("<H")
_CLIENT = struct.Struct(f"<HHH{_NONCE_BYTES}sQQQH")  # three versions, nonce, id, incarnation, connection, stream
_REPLY = struct.Struct("<BQQ")  # code, id, incarnation
_CLIENT_LABEL = b"pibroch rpc client proof\0"
_SERVER_LABEL = b"pibroch rpc server proof\0"


class Code(IntEnum):
    """What the server's reply says."""

    ACCEPTED = 0
    WRONG_SECRET = 1
    WRONG_VERSION = 2
    WRONG_WORKER = 3
    MALFORMED = 4


@dataclass(frozen=True, slots=True)
class Identity:
    """A worker as it shows itself.

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
        connection_id: chosen at random by the dialler, below 2**64, shared by all streams of one connection.
        stream: 0 for messages, from 1 on for bulk data.
    """

    connection_id: int
    stream: int = 0


class _Side:
    """What both sides share: a buffer that never holds more than one message."""

    def __init__(self, secret: bytes, me: Identity) -> None:
        _short(me.name)
        self._secret = secret
        self._me = me
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

    def _proof(self, label: bytes, said: bytes) -> bytes:
        return hmac.new(self._secret, label + self._transcript + said, hashlib.sha256).digest()

    def _message(self) -> bytes | None:
        """The buffered message, or ``None`` while it is incomplete; what follows it becomes the surplus."""
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a handshake message of {length} bytes", f"at most {MAX_MESSAGE_BYTES}")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        self.surplus = bytes(self._buffer[end:])
        message = bytes(self._buffer[_LENGTH.size : end])
        self._buffer.clear()
        return message


class Client(_Side):
    """The side that dials.

    Args:
        secret: the job's.
        me: this worker.
        expected_name: the worker that it wants to reach.
        purpose: of this connection.
        nonce: 32 random bytes, given by tests only.
        versions: lowest and highest spoken.
    """

    def __init__(
        self,
        secret: bytes,
        me: Identity,
        expected_name: str,
        purpose: Purpose,
        *,
        nonce: bytes | None = None,
        versions: tuple[int, int] = VERSIONS,
    ) -> None:
        super().__init__(secret, me)
        self._expected = _short(expected_name)
        self._purpose = purpose
        self._nonce = nonce or secrets.token_bytes(_NONCE_BYTES)
        self._versions = versions
        self._greeted = False
        self.version = 0  # 0 until both have agreed on one

    def start(self) -> bytes:
        """What to send before anything was received: nothing, the server speaks first."""
        return b""

    def receive(self, data: bytes) -> bytes:
        """Takes any number of bytes, returns what to send.

        Raises:
            AuthenticationError: the server refused, cannot prove itself, is another worker or speaks another version.
            ProtocolError: these are not the bytes of a handshake.
        """
        if self.done:
            self.surplus += data
            return b""
        self._buffer += data
        if not self._greeted:
            return self._greet()
        message = self._message()
        if message is not None:
            self._check(message)
        return b""

    def _greet(self) -> bytes:
        seen = bytes(self._buffer[: len(MAGIC)])
        if not MAGIC.startswith(seen):
            raise ProtocolError(f"{seen!r} as a first word", "a pibroch worker", "look who listens at this address")
        if len(self._buffer) < _HELLO.size:
            return b""
        if len(self._buffer) > _HELLO.size:
            raise ProtocolError("bytes after the hello", "a server that waits for the client's proof")
        hello = bytes(self._buffer)
        self._buffer.clear()
        self._greeted = True
        _, lowest, highest, _ = _HELLO.unpack(hello)
        self.version = _agree(self._versions, (lowest, highest))
        fixed = _CLIENT.pack(
            *self._versions,
            self.version,
            self._nonce,
            self._me.id,
            self._me.incarnation,
            self._purpose.connection_id,
            self._purpose.stream,
        )
        said = fixed + _packed(_short(self._me.name)) + _packed(self._expected)
        self._transcript = hello
        proof = self._proof(_CLIENT_LABEL, said)
        self._transcript += said + proof
        return _framed(said + proof)

    def _check(self, message: bytes) -> None:
        code = message[0] if message else Code.MALFORMED
        if code not in (Code.ACCEPTED, Code.WRONG_WORKER):
            self._refused(code)
        said, proof = message[:-_MAC_BYTES], message[-_MAC_BYTES:]
        if not hmac.compare_digest(proof, self._proof(_SERVER_LABEL, said)):
            raise AuthenticationError(
                f"a server without the job's secret in place of worker {self._expected.decode()!r}",
                "a worker of this job",
                "look who listens at this address",
            )
        if len(said) < _REPLY.size:
            raise ProtocolError(f"a reply of {len(message)} bytes", f"at least {_REPLY.size + _MAC_BYTES}")
        _, worker_id, incarnation = _REPLY.unpack_from(said)
        name, rest = _unpacked(said[_REPLY.size :])
        if rest:
            raise ProtocolError(f"{len(rest)} bytes after the server's identity", "none")
        if code == Code.WRONG_WORKER or name.encode() != self._expected:
            raise AuthenticationError(
                f"worker {name!r} at the address of worker {self._expected.decode()!r}",
                "the worker that was dialled",
                "the address is out of date; look the worker up again",
            )
        self._peer = Identity(name, worker_id, incarnation)

    def _refused(self, code: int) -> NoReturn:
        worker = repr(self._expected.decode())
        if code == Code.WRONG_SECRET:
            raise AuthenticationError(
                f"a refusal by worker {worker}: our secret is not its own",
                "the same secret in all workers of a job",
                "set PIBROCH_RPC_SECRET or the option secret alike everywhere",
            )
        if code == Code.WRONG_VERSION:
            raise AuthenticationError(f"a refusal by worker {worker}: it does not speak version {self.version}")
        raise ProtocolError(f"a refusal with code {code} by worker {worker}", "a handshake that both understand")


class Server(_Side):
    """The side that was dialled.

    When ``receive`` raises, ``refusal`` holds what to send before closing, so that the client can say why.

    Args:
        secret: the job's.
        me: this worker.
        nonce: 32 random bytes, given by tests only.
        versions: lowest and highest spoken.
    """

    def __init__(
        self,
        secret: bytes,
        me: Identity,
        *,
        nonce: bytes | None = None,
        versions: tuple[int, int] = VERSIONS,
    ) -> None:
        super().__init__(secret, me)
        self._versions = versions
        self._transcript = _HELLO.pack(MAGIC, *versions, nonce or secrets.token_bytes(_NONCE_BYTES))
        self._purpose: Purpose | None = None
        self.refusal = b""
        self.version = 0  # 0 until both have agreed on one

    @property
    def purpose(self) -> Purpose:
        """What the client wants the connection for, once ``done``."""
        assert self._purpose is not None, "asked for the purpose before the handshake was done"
        return self._purpose

    def start(self) -> bytes:
        """What to send at once."""
        return self._transcript

    def receive(self, data: bytes) -> bytes:
        """Takes any number of bytes, returns what to send.

        Raises:
            AuthenticationError: the client does not know the secret, repeats a handshake, wants another worker or version.
            ProtocolError: these are not the bytes of a handshake.
        """
        if self.done:
            self.surplus += data
            return b""
        self._buffer += data
        try:
            message = self._message()
            return b"" if message is None else self._check(message)
        except ProtocolError:
            self.refusal = self.refusal or _framed(bytes([Code.MALFORMED]))
            raise

    def _check(self, message: bytes) -> bytes:
        said, proof = message[:-_MAC_BYTES], message[-_MAC_BYTES:]
        if not hmac.compare_digest(proof, self._proof(_CLIENT_LABEL, said)):
            self._refuse(
                Code.WRONG_SECRET,
                AuthenticationError(
                    "a client without the job's secret, or a repeated handshake", "a worker of this job"
                ),
            )
        if len(said) < _CLIENT.size:
            raise ProtocolError(f"a handshake message of {len(message)} bytes", f"at least {_CLIENT.size + _MAC_BYTES}")
        lowest, highest, chosen, _, worker_id, incarnation, connection_id, stream = _CLIENT.unpack_from(said)
        name, rest = _unpacked(said[_CLIENT.size :])
        expected, rest = _unpacked(rest)
        if rest:
            raise ProtocolError(f"{len(rest)} bytes after the client's identity", "none")
        self._transcript += message
        if chosen != _common(self._versions, (lowest, highest)):
            error = AuthenticationError(f"version {chosen} by worker {name!r}", f"one of {_range(self._versions)}")
            self._refuse(Code.WRONG_VERSION, error)
        if expected != self._me.name:
            error = AuthenticationError(f"worker {name!r} that wants worker {expected!r}", f"{self._me.name!r}")
            self._refuse(Code.WRONG_WORKER, error)
        self.version = chosen
        self._purpose = Purpose(connection_id, stream)
        self._peer = Identity(name, worker_id, incarnation)
        return self._reply(Code.ACCEPTED)

    def _reply(self, code: Code) -> bytes:
        said = _REPLY.pack(code, self._me.id, self._me.incarnation) + _packed(_short(self._me.name))
        return _framed(said + self._proof(_SERVER_LABEL, said))

    def _refuse(self, code: Code, error: PibrochError) -> NoReturn:
        # who dialled the wrong worker has proved itself and may know who we are; nobody else
        self.refusal = self._reply(code) if code == Code.WRONG_WORKER else _framed(bytes([code]))
        self.surplus = b""
        raise error


def _common(ours: tuple[int, int], theirs: tuple[int, int]) -> int:
    """The highest version that both speak, 0 when there is none."""
    highest = min(ours[1], theirs[1])
    return highest if highest >= max(ours[0], theirs[0]) else 0


def _agree(ours: tuple[int, int], theirs: tuple[int, int]) -> int:
    version = _common(ours, theirs)
    if not version:
        raise AuthenticationError(
            f"a worker that speaks versions {_range(theirs)}",
            f"one of {_range(ours)}",
            "install the same pibroch everywhere",
        )
    return version


def _range(versions: tuple[int, int]) -> str:
    return f"{versions[0]} to {versions[1]}"


def _short(name: str) -> bytes:
    encoded = name.encode()
    if not 0 < len(encoded) <= MAX_NAME_BYTES:
        raise ProtocolError(f"a worker's name of {len(encoded)} bytes", f"1 to {MAX_NAME_BYTES}")
    return encoded


def _framed(message: bytes) -> bytes:
    return _LENGTH.pack(len(message)) + message


def _packed(name: bytes) -> bytes:
    return bytes([len(name)]) + name


def _unpacked(data: bytes) -> tuple[str, bytes]:
    """A name with its length before it, and what follows."""
    length = data[0] if data else 0
    if not length or len(data) < 1 + length:
        raise ProtocolError("a name that is empty or cut off", "its length in one byte, then that many bytes")
    try:
        return data[1 : 1 + length].decode(), data[1 + length :]
    except UnicodeDecodeError as error:
        raise ProtocolError("a name that is no text", "UTF-8") from error
