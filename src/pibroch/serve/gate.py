"""What every request passes on its way in and out: token, size of its body, metrics; and no error gets by unseen."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from pibroch.serve.prometheus import ServerMetrics
from pibroch.serve.settings import Refusal, ServerLimits

logger = logging.getLogger(__name__)
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = ("/v2/health/live", "/v2/health/ready")
"""What a load balancer asks, without a token."""
JSON_TYPE = (b"content-type", b"application/json")


class Gate:
    """An ASGI application around another.

    Args:
        app: the other.
        limits: of bodies.
        metrics: of all answers.
        token: that requests must bear; none needed when absent.

    Attributes:
        num_open: requests that have no answer yet.
        is_draining: set when the server is about to end: answers then close their connections.
    """

    def __init__(
        self, app: App, limits: ServerLimits, metrics: ServerMetrics, token: str | None
    ) -> None:
        self._app, self._limits, self._metrics = app, limits, metrics
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
        started, status = time.monotonic(), 0

        async def watched(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self.is_draining:
                    message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        self.num_open += 1
        try:
            headers = dict(scope["headers"])
            self.check(scope["path"], headers)
            await self._app(scope, self._bounded(receive, started), watched)
        except Refusal as refusal:
            if not status:
                await refuse(watched, refusal)
        except Exception:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if not status:
                await refuse(watched, Refusal(500, "the server failed; its log has the reason"))
        finally:
            self.num_open -= 1
            self._metrics.request(endpoint_of(scope["path"]), status, time.monotonic() - started)

    def check(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        """Raise Refusal for what can be told from the headers alone."""
        if self._expected is not None and path not in OPEN_PATHS:
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                reason = "got a wrong token" if given else "got no token"
                raise Refusal(
                    401,
                    f"{reason}; need the header Authorization: Bearer TOKEN",
                    {"www-authenticate": "Bearer"},
                )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self._limits.body_bytes:
            raise self._too_large()
        encoding = headers.get(b"content-encoding", b"identity").lower()
        if encoding not in (b"", b"identity"):
            raise Refusal(415, f"got a body in {encoding.decode('latin-1')[:40]}; need it as it is")

    def _too_large(self) -> Refusal:
        return Refusal(
            413, f"got a body above {self._limits.body_bytes:,} bytes; send fewer rows at once"
        )

    def _bounded(self, receive: Receive, started: float) -> Receive:
        """Receives no more bytes, and for no longer, than a body may take."""
        taken, is_complete = 0, False
        deadline = started + self._limits.body_timeout_s

        async def bounded() -> MutableMapping[str, Any]:
            nonlocal taken, is_complete
            if is_complete:
                return await receive()  # waits for the client to leave
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    message = await receive()
            except TimeoutError as error:
                reason = f"got {taken:,} bytes of a body in {self._limits.body_timeout_s:g} s; need it whole by then"
                raise Refusal(408, reason, {"connection": "close"}) from error
            taken += len(message.get("body", b""))
            is_complete = not message.get("more_body", False)
            if taken > self._limits.body_bytes:
                raise self._too_large()
            return message

        return bounded


def endpoint_of(path: str) -> str:
    """Under which name a request is counted."""
    return (
        "infer"
        if path.endswith("/infer")
        else {"/score": "score", "/embed": "embed"}.get(path, "other")
    )


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
