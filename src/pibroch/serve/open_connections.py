"""All connections of a server.

How many there are, which may be closed for a new one, and their bytes together.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from math import inf
from typing import Protocol

from pibroch.serve.settings import Refusal, ServerLimits

logger = logging.getLogger(__name__)


class Connection(Protocol):
    """What is counted."""

    def abort(self) -> None:
        """Close now, whatever was not sent yet."""


class OpenConnections:
    """The connections of one event loop.

    Args:
        limits: of their number and of their bytes, and of each by itself.

    Attributes:
        num_bytes: of bodies that came and of answers that were not sent yet, over all connections.
    """

    def __init__(self, limits: ServerLimits) -> None:
        self.limits = limits
        self._all: set[Connection] = set()
        self._idle: dict[Connection, None] = {}  # the one that has waited longest comes first
        self._has_warned = False
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._all)

    def add(self, connection: Connection) -> bool:
        """Count a new connection, which is idle; whether there is room for it.

        Where there is none, the connection that has been without a whole request for longest is
        closed. If every one has a request that is being answered, the new one has to go.
        """
        has_room = len(self._all) < self.limits.connections
        if not has_room:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("%d connections are open: idle ones are closed", len(self._all))
            oldest = next(iter(self._idle), None)
            if oldest is not None:
                self.remove(oldest)
                oldest.abort()
                has_room = True
        self._all.add(connection)
        self._idle[connection] = None
        return has_room

    def remove(self, connection: Connection) -> None:
        """It is closed, or another takes its place."""
        self._all.discard(connection)
        self._idle.pop(connection, None)

    def idle(self, connection: Connection) -> None:
        """It has no whole request from now on."""
        if connection in self._all:
            self._idle[connection] = None

    def busy(self, connection: Connection) -> None:
        """It has a whole request, which is to be answered."""
        self._idle.pop(connection, None)

    def abort_all(self) -> None:
        """Close all."""
        for connection in list(self._all):
            connection.abort()

    def check_bytes(self, count: int, own: int = 0) -> None:
        """Raise Refusal where so many more bytes are too many.

        Args:
            count: of them.
            own: of the same request, counted already; with these alone it is never of use to try
                again.
        """
        most = self.limits.total_bytes
        if own + count > most:
            got = f"got a request of {own + count:,} bytes with its answer"
            raise Refusal(413, f"{got}; need at most {most:,}: ask for less at once")
        if self.num_bytes + count > most:
            got = f"got {count:,} bytes with {self.num_bytes:,} under way in all connections"
            raise Refusal(503, f"{got}; need at most {most:,}: try again", {"retry-after": "1"})


class Deadline:
    """A time by which something has to happen.

    To move it costs no timer: one that comes too early is set again.

    Args:
        on_passed: called when it has passed.
    """

    __slots__ = ("_at", "_loop", "_on_passed", "_timer", "_timer_at")

    def __init__(self, loop: asyncio.AbstractEventLoop, on_passed: Callable[[], None]) -> None:
        self._loop = loop
        self._on_passed = on_passed
        self._at = self._timer_at = inf
        self._timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float) -> None:
        """So many seconds from now on."""
        self._at = self._loop.time() + seconds
        if self._at < self._timer_at:
            self._start_timer()

    def clear(self) -> None:
        """There is none."""
        self._at = inf

    def close(self) -> None:
        """There will be none."""
        self._at = inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._timer_at = inf

    def _start_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._at, self._check)
        self._timer_at = self._at

    def _check(self) -> None:
        self._timer = None
        self._timer_at = inf
        if self._at > self._loop.time():
            if self._at < inf:
                self._start_timer()
            return
        self._at = inf
        self._on_passed()
