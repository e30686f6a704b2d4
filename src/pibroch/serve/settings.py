"""What a server may be asked, and how it answers what it refuses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds of what is taken from clients.

    Attributes:
        body_bytes: of a request, and of what a compressed one holds; a larger one is refused with
            413. Also of the embeddings or the best items of an answer; more are refused with 400.
        rows: of a request; more are refused with 400.
        batch_rows: rows that are computed together; requests are never divided, so this is at least
            ``rows``.
        queue_rows: rows that wait; when more would, requests are refused with 429.
        batch_delay_ms: how long a request may wait for others that could be computed with it.
        body_timeout_s: for a TLS handshake, for a request's head to arrive, and then for its body;
            a slower one is refused with 408.
        answer_timeout_s: for an answer to be computed; 503 then.
        write_timeout_s: for a client to read an answer; the connection is closed then.
        idle_timeout_s: between an answer and the next request; the connection is closed then.
        connections: at once; for one more the idlest is closed, and where none is idle it is
            refused with 503.
        total_bytes: of bodies that came and of answers that were not read yet, over all
            connections; what would be more is refused with 503, or with 413 where one request
            is more by itself.
    """

    body_bytes: int = 16 << 20
    rows: int = 8192
    batch_rows: int = 8192
    queue_rows: int = 32768
    batch_delay_ms: float = 0.0
    body_timeout_s: float = 15.0
    answer_timeout_s: float = 30.0
    write_timeout_s: float = 30.0
    idle_timeout_s: float = 30.0
    connections: int = 4096
    total_bytes: int = 128 << 20


class Refusal(Exception):
    """A request that is answered with an HTTP status and a reason.

    Args:
        status: of the answer.
        reason: for the client's user: what was got, what is needed.
        headers: of the answer.
    """

    def __init__(self, status: int, reason: str, headers: dict[str, str] | None = None) -> None:
        self.status = status
        self.reason = reason
        self.headers = headers or {}
        super().__init__(reason)
