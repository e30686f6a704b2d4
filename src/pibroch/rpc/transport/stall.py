"""A watch for frames that were begun and never completed.

A sender writes whole frames, so the length in the header of such a frame is wrong.
"""

from __future__ import annotations

import time
import weakref
from typing import Protocol

from pibroch.rpc.transport.reactor import Reactor

STALL_S = 10.0
STALL_BYTES = 10 << 10  # even a slow link delivers so much in that time


class WatchedStream(Protocol):
    """The part of a stream that is used here."""

    @property
    def is_closed(self) -> bool:
        """Whether nothing is received any more."""

    @property
    def num_begun(self) -> tuple[int, int]:
        """Frames that were begun, and bytes of the one that is not complete."""

    def close(self, reason: str) -> None:
        """Close the stream (on the loop)."""


class StallWatch:
    """Closes a stream whose begun frame is not completed, as all later frames would be lost in it.

    There is one timer at a time, on the loop.
    """

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._is_on = False

    def watch(self, stream: WatchedStream) -> None:
        """Plan to check in a while whether the frame that was begun is complete."""
        if not self._is_on:
            self._is_on = True
            before = stream.num_begun
            # a timer must not keep a closed stream, and its buffer
            reference = weakref.ref(stream)

            def check() -> None:
                stream = reference()
                if stream is not None:
                    self._check(stream, before)

            self._reactor.call_at(time.monotonic() + STALL_S, check)

    def _check(self, stream: WatchedStream, before: tuple[int, int]) -> None:
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
