"""What every request passes on its way in and out: token, size of its body, metrics.

And no error gets by unseen.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from pibroch.serve.endpoints import GET, JSON_TYPE, Endpoint, Reply, Request, find_endpoint
from pibroch.serve.open_connections import OpenConnections
from pibroch.serve.prometheus import ServerMetrics
from pibroch.serve.settings import Refusal, ServerLimits

logger = logging.getLogger(__name__)
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

OPEN_PATHS = ("/v2/health/live", "/v2/health/ready")
"""What a load balancer asks, without a token."""
PLAIN = ("", "identity")
_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""Of the encodings of bodies that are read, for zlib; `deflate` is its own format (RFC 9110)."""
_STEP_BYTES = 4096
"""Of a compressed body, which become at most 4 MB; then it is other requests' turn."""
REFUSAL = "pibroch.refusal"
"""Key of a request's state: why its connection refuses it; the answer waits for its turn."""


class AdmissionControl:
    """An ASGI application around the endpoints.

    Args:
        endpoints: that answer, by path.
        metrics: of all answers.
        token: that requests must bear; none needed when absent.
        open_connections: whose bytes are counted, and whose limits hold.

    Attributes:
        num_open: requests that have no answer yet.
        is_draining: set when the server is about to end: answers then close their connections.
    """

    def __init__(
        self,
        endpoints: Mapping[str, Endpoint],
        metrics: ServerMetrics,
        token: str | None,
        open_connections: OpenConnections,
    ) -> None:
        self._endpoints = endpoints
        self._metrics = metrics
        self._open_connections = open_connections
        self._token = None if token is None else token.encode()
        self.num_open = 0
        self.is_draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        started = time.monotonic()
        status = 0
        self.num_open += 1
        body = _BoundedBody(receive, started, self._open_connections)
        try:
            reply = await self._reply(scope, body)
            status = reply.status
            headers = [*reply.headers, (b"content-length", str(len(reply.body)).encode())]
            if self.is_draining:
                headers.append((b"connection", b"close"))
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": reply.body})
        finally:
            self.num_open -= 1
            self._open_connections.num_bytes -= body.num_bytes
            self._metrics.request(endpoint_of(scope["path"]), status, time.monotonic() - started)

    async def _reply(self, scope: Scope, body: _BoundedBody) -> Reply:
        method = scope["method"]
        path = scope["path"]
        headers = dict(scope["headers"])
        try:
            if REFUSAL in scope.get("state", ()):
                raise scope["state"][REFUSAL]
            self.check(path, headers)
            endpoint, model, version = find_endpoint(self._endpoints, method, path)
            if endpoint.methods == GET:
                return await endpoint.answer(Request(b"", headers, model, version))
            content = await body.read(_encoding_of(headers))
            reply = await endpoint.answer(Request(content, headers, model, version))
            self._open_connections.check_bytes(len(reply.body), body.num_bytes)
            return reply
        except Refusal as refusal:
            return _refused(refusal)
        except Exception:
            logger.exception("%s %s failed", method, path)
            return _refused(Refusal(500, "the server failed; its log has the reason"))

    def check(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        """Raise Refusal for what can be told from the headers alone."""
        if self._token is not None and path.removesuffix("/") not in OPEN_PATHS:
            scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
            is_right = hmac.compare_digest(token.strip(b" "), self._token)
            if scheme.lower() != b"bearer" or not is_right:
                got = "got a wrong token" if scheme else "got no token"
                need = "need the header Authorization: Bearer TOKEN"
                raise Refusal(401, f"{got}; {need}", {"www-authenticate": "Bearer"})
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]):
            limits = self._open_connections.limits
            if int(length[:20]) > limits.body_bytes:
                raise _too_large(limits)
            self._open_connections.check_bytes(int(length))
        encoding = _encoding_of(headers)
        if encoding not in (*PLAIN, *_WINDOW_BITS):
            need = "need it as it is, or in one of gzip and deflate"
            accepted = {"accept-encoding": "gzip, deflate"}
            raise Refusal(415, f"got a body in {encoding[:40]}; {need}", accepted)


def _encoding_of(headers: Mapping[bytes, bytes]) -> str:
    return headers.get(b"content-encoding", b"").decode("latin-1").strip().lower()


class _BoundedBody:
    """A body of no more bytes, and for no longer, than it may have.

    Attributes:
        num_bytes: that were received and counted, and what compressed ones became.
    """

    def __init__(self, receive: Receive, started: float, open_connections: OpenConnections) -> None:
        self._receive = receive
        self._limits = open_connections.limits
        self._open_connections = open_connections
        self._deadline = started + self._limits.body_timeout_s
        self.num_bytes = 0

    async def read(self, encoding: str) -> bytes:
        """All of it, uncompressed; Refusal for what is too much, too late or damaged."""
        body = await self._received()
        return body if encoding in PLAIN else await self._expanded(body, encoding)

    async def _received(self) -> bytes:
        parts = []
        has_more = True
        try:
            async with asyncio.timeout(self._deadline - time.monotonic()):
                while has_more:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":  # it will not see the answer
                        raise Refusal(400, "the client left in the middle of its request")
                    parts.append(self._counted(message.get("body", b""), self.num_bytes))
                    has_more = message.get("more_body", False)
        except TimeoutError as error:
            got = f"got {self.num_bytes:,} bytes of a body in {self._limits.body_timeout_s:g} s"
            reason = f"{got}; need it whole by then"
            raise Refusal(408, reason, {"connection": "close"}) from error
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _expanded(self, body: bytes, encoding: str) -> bytes:
        decoder = zlib.decompressobj(_WINDOW_BITS[encoding])
        parts = []
        size = 0
        end = 0
        for start in range(0, len(body), _STEP_BYTES):
            if start:
                await asyncio.sleep(0)
            try:
                part = decoder.decompress(body[start : start + _STEP_BYTES])
            except zlib.error as error:
                raise Refusal(400, f"got a body that is no {encoding}: {error}") from error
            parts.append(self._counted(part, size))
            size += len(part)
            end = min(start + _STEP_BYTES, len(body)) - len(decoder.unused_data)
            if decoder.eof:
                break
        if not decoder.eof:
            raise Refusal(400, f"got {len(body)} bytes of {encoding} that end too early")
        if end < len(body):
            raise Refusal(
                400, f"got {len(body) - end} bytes behind a body in {encoding}; need none"
            )
        return b"".join(parts)

    def _counted(self, part: bytes, before: int) -> bytes:
        if before + len(part) > self._limits.body_bytes:
            raise _too_large(self._limits)
        self._open_connections.check_bytes(len(part), self.num_bytes)
        self._open_connections.num_bytes += len(part)
        self.num_bytes += len(part)
        return part


def _too_large(limits: ServerLimits) -> Refusal:
    return Refusal(413, f"got a body above {limits.body_bytes:,} bytes; send fewer rows at once")


def endpoint_of(path: str) -> str:
    """Under which name a request is counted."""
    path = path.removesuffix("/")
    if path.endswith("/infer"):
        return "infer"
    return {"/score": "score", "/embed": "embed", "/retrieve": "retrieve"}.get(path, "other")


def error_body(reason: str) -> bytes:
    """As the protocol says it; whatever characters a client has sent come back escaped."""
    return json.dumps({"error": reason}).encode()


def _refused(refusal: Refusal) -> Reply:
    """A status and a reason, as the protocol says it."""
    headers = [
        (name.encode("latin-1"), value.encode("latin-1")) for name, value in refusal.headers.items()
    ]
    return Reply(error_body(refusal.reason), (*headers, JSON_TYPE), refusal.status)
