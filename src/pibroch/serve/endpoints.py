"""Requests, answers, and the endpoints between them.

Paths are looked up, as the router of a web framework costs as much as a score.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from pibroch.serve.settings import Refusal

GET = ("GET", "HEAD")
POST = ("POST",)
JSON_TYPE = (b"content-type", b"application/json")
_MODELS = "/v2/models/"


@dataclass(frozen=True, slots=True)
class Request:
    """A request.

    Attributes:
        body: all of it, as it came; empty where its endpoint reads none.
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
    """An answer, but for its length."""

    body: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    status: int = 200


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What is at a path.

    Attributes:
        methods: by which it is asked: :data:`GET`, or :data:`POST`, of which the body is read.
        path: with ``{model}`` and ``{version}`` in place of what it may name.
        answer: to a request.
        form: of a body, as OpenAPI describes it.
        answers: by status, as OpenAPI describes them; any other is a refusal.
    """

    methods: tuple[str, ...]
    path: str
    answer: Callable[[Request], Awaitable[Reply]]
    form: Mapping[str, object] | None = None
    answers: Mapping[str, object] = field(default_factory=dict)


def find_endpoint(
    by_path: Mapping[str, Endpoint], method: str, path: str
) -> tuple[Endpoint, str | None, str | None]:
    """Which is asked, and the model and the version that the path names.

    Raises:
        Refusal: where there is none, or another method is needed.
    """
    pattern, model, version = named_in(path)
    endpoint = by_path.get(pattern)
    if endpoint is not None and method in endpoint.methods:
        return endpoint, model, version
    there = "the endpoints at /docs" if "/docs" in by_path else ", ".join(by_path)
    reason = f"got {method[:20]} {path[:200]}; need one of {there}"
    if endpoint is None:
        raise Refusal(404, reason)
    raise Refusal(405, reason, {"allow": ", ".join(endpoint.methods)})


def named_in(path: str) -> tuple[str, str | None, str | None]:
    """A path with placeholders for the model and the version that it names, and these.

    A slash at its end says nothing.

    >>> named_in("/v2/models/ctr/versions/7/infer")
    ('/v2/models/{model}/versions/{version}/infer', 'ctr', '7')
    >>> named_in("/v2/models/ctr/"), named_in("/score")
    (('/v2/models/{model}', 'ctr', None), ('/score', None, None))
    """
    path = path.removesuffix("/")
    if path.startswith(_MODELS):
        match path.removeprefix(_MODELS).split("/"):
            case [model, "versions", version, *rest] if model and version:
                names = "{model}", "versions", "{version}"
                return _MODELS + "/".join((*names, *rest)), model, version
            case [model, *rest] if model:
                return _MODELS + "/".join(("{model}", *rest)), model, None
    return path, None, None
