"""Frames that were begun and do not come.

A sender hands over whole ones, so the length in such a header is wrong.
"""

from __future__ import annotations

import time
import weakref
from typing import Protocol

from pibroch.rpc.transport.reactor import Reactor

STALL_S = 10.0
STALL_BYTES = 10 << 10  # what even a slow link brings in this time


class WatchedStream(Protocol):
    """What may stall."""

    @property
    def is_closed(self) -> bool:
        """Whether nothing is received any more."""

    @property
    def num_begun(self) -> tuple[int, int]:
        """Frames that were begun, and bytes of the one that is not complete."""

    def close(self, reason: str) -> None:
        """Close it (on the loop)."""


class StallWatch:
    """Closes a stream whose begun frame stays begun: what follows would be lost in it.

    One timer at a time (on the loop).
    """

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._is_on = False

    def watch(self, stream: WatchedStream) -> None:
        """Look again in a while whether the frame that was begun has come."""
        if not self._is_on:
            self._is_on = True
            # a timer must not keep a closed stream, and its buffer
            before = stream.num_begun
            this = weakref.ref(stream)

            def look() -> None:
                stream = this()
                if stream is not None:
                    self._look(stream, before)

            self._reactor.call_at(time.monotonic() + STALL_S, look)

    def _look(self, stream: WatchedStream, before: tuple[int, int]) -> None:
        self._is_on = False
        num_frames, num_staged = stream.num_begun
        if stream.is_closed or not num_staged:
            return
        if num_frames == before[0] and num_staged - before[1] < STALL_BYTES:
            stream.close(
                f"a frame was begun {STALL_S:g} s ago and does not come; the length in its header"
                " may be damaged"
            )
        else:
            self.watch(stream)
