"""What every request passes on its way in and out: token, size of its body, metrics.

And no error gets by unseen.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from pibroch.serve.open_connections import OpenConnections
from pibroch.serve.prometheus import ServerMetrics
from pibroch.serve.settings import Refusal, ServerLimits

logger = logging.getLogger(__name__)
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = ("/v2/health/live", "/v2/health/ready")
"""What a load balancer asks, without a token."""
REFUSAL = "pibroch.refusal"
"""Key of a request's state: why its connection refuses it; the answer waits for its turn."""
JSON_TYPE = (b"content-type", b"application/json")


class AdmissionControl:
    """An ASGI application around another.

    Args:
        app: the other.
        limits: of bodies.
        metrics: of all answers.
        token: that requests must bear; none needed when absent.
        open_connections: whose bytes are counted.

    Attributes:
        num_open: requests that have no answer yet.
        is_draining: set when the server is about to end: answers then close their connections.
    """

    def __init__(
        self,
        app: App,
        limits: ServerLimits,
        metrics: ServerMetrics,
        token: str | None,
        open_connections: OpenConnections,
    ) -> None:
        self._app = app
        self._limits = limits
        self._metrics = metrics
        self._open_connections = open_connections
        self._expected = None if token is None else f"Bearer {token}".encode()
        self.num_open = 0
        self.is_draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        status = 0

        async def watched(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self.is_draining:
                    message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        self.num_open += 1
        body = _BoundedBody(receive, started, self._limits, self._open_connections)
        try:
            if REFUSAL in scope.get("state", ()):
                raise scope["state"][REFUSAL]
            self.check(scope["path"], dict(scope["headers"]))
            await self._app(scope, body.receive, watched)
        except Refusal as refusal:
            if not status:
                await refuse(watched, refusal)
        except Exception:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if not status:
                await refuse(watched, Refusal(500, "the server failed; its log has the reason"))
        finally:
            self.num_open -= 1
            self._open_connections.num_bytes -= body.num_bytes
            self._metrics.request(endpoint_of(scope["path"]), status, time.monotonic() - started)

    def check(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        """Raise Refusal for what can be told from the headers alone."""
        if self._expected is not None and path not in OPEN_PATHS:
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                got = "got a wrong token" if given else "got no token"
                need = "need the header Authorization: Bearer TOKEN"
                raise Refusal(401, f"{got}; {need}", {"www-authenticate": "Bearer"})
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]):
            if int(length[:20]) > self._limits.body_bytes:
                raise _too_large(self._limits)
            self._open_connections.check_bytes(int(length))
        encoding = headers.get(b"content-encoding", b"identity").lower()
        if encoding not in (b"", b"identity"):
            got = f"got a body in {encoding.decode('latin-1')[:40]}"
            raise Refusal(415, f"{got}; need it as it is", {"accept-encoding": "identity"})


class _BoundedBody:
    """Receives a body of no more bytes, and for no longer, than it may have.

    Attributes:
        num_bytes: that were received and counted.
    """

    def __init__(
        self,
        receive: Receive,
        started: float,
        limits: ServerLimits,
        open_connections: OpenConnections,
    ) -> None:
        self._receive = receive
        self._limits = limits
        self._open_connections = open_connections
        self._deadline = started + limits.body_timeout_s
        self._is_complete = False
        self.num_bytes = 0

    async def receive(self) -> MutableMapping[str, Any]:
        """The next message; Refusal for what is too much or too late."""
        if self._is_complete:
            return await self._receive()  # waits for the client to leave
        try:
            async with asyncio.timeout(self._deadline - time.monotonic()):
                message = await self._receive()
        except TimeoutError as error:
            got = f"got {self.num_bytes:,} bytes of a body in {self._limits.body_timeout_s:g} s"
            reason = f"{got}; need it whole by then"
            raise Refusal(408, reason, {"connection": "close"}) from error
        self._is_complete = not message.get("more_body", False)
        count = len(message.get("body", b""))
        if self.num_bytes + count > self._limits.body_bytes:
            raise _too_large(self._limits)
        self._open_connections.check_bytes(count)
        self._open_connections.num_bytes += count
        self.num_bytes += count
        return message


def _too_large(limits: ServerLimits) -> Refusal:
    return Refusal(413, f"got a body above {limits.body_bytes:,} bytes; send fewer rows at once")


def endpoint_of(path: str) -> str:
    """Under which name a request is counted."""
    if path.endswith("/infer"):
        return "infer"
    return {"/score": "score", "/embed": "embed", "/retrieve": "retrieve"}.get(path, "other")


def error_body(reason: str) -> bytes:
    """As the protocol says it; whatever characters a client has sent come back escaped."""
    return json.dumps({"error": reason}).encode()


async def refuse(send: Send, refusal: Refusal) -> None:
    """Answer with a status and a reason, as the protocol says it."""
    body = error_body(refusal.reason)
    headers = [
        (name.encode("latin-1"), value.encode("latin-1")) for name, value in refusal.headers.items()
    ]
    headers += [JSON_TYPE, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
