"""The busiest endpoints, answered without a router, which costs as much as a score."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from pibroch.serve.admission import App, Receive, Scope, Send
from pibroch.serve.settings import Refusal

SCORE_PATH = "/score"
EMBED_PATH = "/embed"
RETRIEVE_PATH = "/retrieve"
_MODELS = "/v2/models/"


@dataclass(frozen=True, slots=True)
class DirectRequest:
    """A request with its whole body.

    Attributes:
        body: as it came.
        headers: by name in small letters.
        model: in the path, where it names one.
        version: in the path, where it names one.
    """

    body: bytes
    headers: Mapping[bytes, bytes]
    model: str | None = None
    version: str | None = None

    def header(self, name: str) -> str | None:
        """A header's value."""
        value = self.headers.get(name.encode())
        return None if value is None else value.decode("latin-1")


@dataclass(frozen=True, slots=True)
class Reply:
    """What is sent with status 200."""

    body: bytes
    headers: tuple[tuple[bytes, bytes], ...]


Answering = Callable[[DirectRequest], Awaitable[Reply]]


class Direct:
    """An ASGI application that answers some requests itself and leaves all others to another.

    Args:
        app: the other.
        answers: to ``POST``, by path.
        infer: answers ``POST /v2/models/.../infer``.
        check_bytes: raises Refusal for an answer of more bytes than there is room for.
    """

    def __init__(
        self,
        app: App,
        answers: Mapping[str, Answering],
        infer: Answering,
        check_bytes: Callable[[int], None],
    ) -> None:
        self._app = app
        self._answers = dict(answers)
        self._infer = infer
        self._check_bytes = check_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; Refusal is for the admission control around this."""
        path = scope["path"]
        answering = self._answers.get(path)
        model = None
        version = None
        if answering is None:
            target = infer_path(path)
            if target is None:
                await self._app(scope, receive, send)
                return
            answering = self._infer
            (model, version) = target
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        reply = await answering(
            DirectRequest(await _whole_body(receive), dict(scope["headers"]), model, version)
        )
        self._check_bytes(len(reply.body))
        headers = [*reply.headers, (b"content-length", str(len(reply.body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": reply.body})


def infer_path(path: str) -> tuple[str, str | None] | None:
    """Model and version that a path names for inference.

    >>> paths = "/v2/models/ctr/infer", "/v2/models/ctr/versions/7/infer", "/v2/models/ctr"
    >>> infer_path(paths[0]), infer_path(paths[1]), infer_path(paths[2])
    (('ctr', None), ('ctr', '7'), None)
    """
    if not path.startswith(_MODELS):
        return None
    match path.removeprefix(_MODELS).split("/"):
        case [model, "infer"] if model:
            return model, None
        case [model, "versions", version, "infer"] if model and version:
            return model, version
    return None


async def _whole_body(receive: Receive) -> bytes:
    message = await receive()
    parts = [message.get("body", b"")]
    while message.get("more_body", False):
        message = await receive()
        parts.append(message.get("body", b""))
    if message["type"] == "http.disconnect":
        raise Refusal(400, "the client left in the middle of its request")  # which it will not see
    return parts[0] if len(parts) == 1 else b"".join(parts)
