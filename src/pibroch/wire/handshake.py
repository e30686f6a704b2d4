"""The handshake: both sides prove that they know the job's secret, before anything else is read.

Pure: bytes in, bytes out. Three messages: the server's hello (magic, versions, nonce), the client's
proof, the server's proof or refusal. A proof is an HMAC-SHA256 over all bytes exchanged before it,
so it fits one server, one client, one purpose and one pair of nonces: to replay or reflect it is
useless. What follows is neither encrypted nor signed; where the network is not trusted, TLS goes
under it. The bytes are in docs/wire-format.md.
"""

from __future__ import annotations

import hmac
import secrets
from typing import NoReturn

from pibroch.errors import AuthenticationError, PibrochError, ProtocolError
from pibroch.wire.handshake_messages import (
    CLIENT,
    CLIENT_LABEL,
    HELLO,
    MAC_BYTES,
    MAGIC,
    NONCE_BYTES,
    REPLY,
    SERVER_LABEL,
    VERSIONS,
    Identity,
    Purpose,
    ReplyCode,
    Side,
    common_version,
    encoded_name,
    framed,
    packed_name,
    range_of,
    unpacked_name,
)


class Client(Side):
    """The side that dials.

    Args:
        secret: the job's.
        me: this worker.
        expected_name: the worker that it wants to reach.
        purpose: of this connection.
        nonce: 32 random bytes, passed by tests only.
        versions: lowest and highest that this side speaks.
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
        super().__init__(secret, me, versions)
        self._expected = encoded_name(expected_name)
        self._purpose = purpose
        self._nonce = nonce or secrets.token_bytes(NONCE_BYTES)
        self._has_hello = False

    def start(self) -> bytes:
        """What to send before anything was received: nothing, the server sends first."""
        return b""

    def _advance(self) -> bytes:
        if not self._has_hello:
            return self._greet()
        message = self._message()
        if message is not None:
            self._check(message)
        return b""

    def _greet(self) -> bytes:
        magic = bytes(self._buffer[: len(MAGIC)])
        if not MAGIC.startswith(magic):
            raise ProtocolError(
                f"{magic!r} as a first word", "a pibroch worker", "look who listens at this address"
            )
        if len(self._buffer) < HELLO.size:
            return b""
        if len(self._buffer) > HELLO.size:
            raise ProtocolError(
                "bytes after the hello", "a server that waits for the client's proof"
            )
        hello = bytes(self._buffer)
        self._buffer.clear()
        self._has_hello = True
        _, lowest, highest, _ = HELLO.unpack(hello)
        self.version = common_version(self._versions, (lowest, highest))
        if not self.version:
            raise AuthenticationError(
                f"a worker that speaks versions {range_of((lowest, highest))}",
                f"one of {range_of(self._versions)}",
                "install the same pibroch everywhere",
            )
        fixed = CLIENT.pack(
            *self._versions,
            self.version,
            self._nonce,
            self._me.id,
            self._me.incarnation,
            self._purpose.connection_id,
            self._purpose.stream,
        )
        body = fixed + packed_name(encoded_name(self._me.name)) + packed_name(self._expected)
        self._transcript = hello
        proof = self._proof(CLIENT_LABEL, body)
        self._transcript += body + proof
        return framed(body + proof)

    def _check(self, message: bytes) -> None:
        code = message[0] if message else ReplyCode.MALFORMED
        if code not in (ReplyCode.ACCEPTED, ReplyCode.WRONG_WORKER):
            self._refused(code)
        body = message[:-MAC_BYTES]
        proof = message[-MAC_BYTES:]
        if not hmac.compare_digest(proof, self._proof(SERVER_LABEL, body)):
            raise AuthenticationError(
                f"a server without the job's secret in place of worker {self._expected.decode()!r}",
                "a worker of this job",
                "look who listens at this address",
            )
        if len(body) < REPLY.size:
            raise ProtocolError(
                f"a reply of {len(message)} bytes", f"at least {REPLY.size + MAC_BYTES}"
            )
        _, worker_id, incarnation = REPLY.unpack_from(body)
        name, rest = unpacked_name(body[REPLY.size :])
        if rest:
            raise ProtocolError(f"{len(rest)} bytes after the server's identity", "none")
        if code == ReplyCode.WRONG_WORKER or name.encode() != self._expected:
            raise AuthenticationError(
                f"worker {name!r} at the address of worker {self._expected.decode()!r}",
                "the worker that was dialled",
                "the address is out of date; look the worker up again",
            )
        self._peer = Identity(name, worker_id, incarnation)

    def _refused(self, code: int) -> NoReturn:
        worker = repr(self._expected.decode())
        if code == ReplyCode.WRONG_SECRET:
            raise AuthenticationError(
                f"a refusal by worker {worker}: our secret is not its own",
                "the same secret in all workers of a job",
                "set PIBROCH_RPC_SECRET or the option secret alike everywhere",
            )
        if code == ReplyCode.WRONG_VERSION:
            raise AuthenticationError(
                f"a refusal by worker {worker}: it does not speak version {self.version}"
            )
        raise ProtocolError(
            f"a refusal with code {code} by worker {worker}", "a handshake that both understand"
        )


class Server(Side):
    """The side that was dialled.

    When ``receive`` raises, ``refusal`` holds what to send before closing, so that the client
    learns why.

    Args:
        secret: the job's.
        me: this worker.
        nonce: 32 random bytes, passed by tests only.
        versions: lowest and highest that this side speaks.
    """

    def __init__(
        self,
        secret: bytes,
        me: Identity,
        *,
        nonce: bytes | None = None,
        versions: tuple[int, int] = VERSIONS,
    ) -> None:
        super().__init__(secret, me, versions)
        self._transcript = HELLO.pack(MAGIC, *versions, nonce or secrets.token_bytes(NONCE_BYTES))
        self._purpose: Purpose | None = None
        self.refusal = b""

    @property
    def purpose(self) -> Purpose:
        """What the client wants the connection for, once ``done``."""
        assert self._purpose is not None, "asked for the purpose before the handshake was done"
        return self._purpose

    def start(self) -> bytes:
        """The hello, to be sent at once."""
        return self._transcript

    def _advance(self) -> bytes:
        try:
            message = self._message()
            return b"" if message is None else self._check(message)
        except ProtocolError:
            self.refusal = self.refusal or framed(bytes([ReplyCode.MALFORMED]))
            raise

    def _check(self, message: bytes) -> bytes:
        body = message[:-MAC_BYTES]
        proof = message[-MAC_BYTES:]
        if not hmac.compare_digest(proof, self._proof(CLIENT_LABEL, body)):
            self._refuse(
                ReplyCode.WRONG_SECRET,
                AuthenticationError(
                    "a client without the job's secret, or a repeated handshake",
                    "a worker of this job",
                ),
            )
        if len(body) < CLIENT.size:
            raise ProtocolError(
                f"a handshake message of {len(message)} bytes",
                f"at least {CLIENT.size + MAC_BYTES}",
            )
        lowest, highest, chosen, _, worker_id, incarnation, connection_id, stream = (
            CLIENT.unpack_from(body)
        )
        name, rest = unpacked_name(body[CLIENT.size :])
        expected, rest = unpacked_name(rest)
        if rest:
            raise ProtocolError(f"{len(rest)} bytes after the client's identity", "none")
        self._transcript += message
        if chosen != common_version(self._versions, (lowest, highest)):
            error = AuthenticationError(
                f"version {chosen} by worker {name!r}", f"one of {range_of(self._versions)}"
            )
            self._refuse(ReplyCode.WRONG_VERSION, error)
        if expected != self._me.name:
            error = AuthenticationError(
                f"worker {name!r} that wants worker {expected!r}", f"{self._me.name!r}"
            )
            self._refuse(ReplyCode.WRONG_WORKER, error)
        self.version = chosen
        self._purpose = Purpose(connection_id, stream)
        self._peer = Identity(name, worker_id, incarnation)
        return self._reply(ReplyCode.ACCEPTED)

    def _reply(self, code: ReplyCode) -> bytes:
        body = REPLY.pack(code, self._me.id, self._me.incarnation) + packed_name(
            encoded_name(self._me.name)
        )
        return framed(body + self._proof(SERVER_LABEL, body))

    def _refuse(self, code: ReplyCode, error: PibrochError) -> NoReturn:
        # a client that dialled the wrong worker has proved itself and may learn who this worker is;
        # no other client may
        self.refusal = (
            self._reply(code) if code == ReplyCode.WRONG_WORKER else framed(bytes([code]))
        )
        self.surplus = b""
        raise error
