"""Calls that wait for an outcome, with deadlines (pure: the time is an argument)."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Receiver(Protocol):
    """Receives the outcome of a call: one of both methods is called, once."""

    def succeed(self, value: object, /) -> None:
        """Take the answer's value."""

    def fail(self, error: BaseException, /) -> None:
        """Take the error in place of an answer."""


class OutcomeTo(NamedTuple):
    """A receiver of two functions; what it keeps lives until the outcome is there."""

    succeed: Callable[[object], None]
    fail: Callable[[BaseException], None]
    keeps: object = None


@dataclass(slots=True)
class PendingCall:
    """A request under way."""

    number: int
    peer: object
    receiver: Receiver
    timeout_s: float


class PendingCalls:
    """Requests by number.

    Finished calls leave the heap of deadlines when they reach its head, or when most calls in it
    are finished.
    """

    def __init__(self) -> None:
        self._calls: dict[int, PendingCall] = {}
        self._deadlines: list[tuple[float, int]] = []  # a heap

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: PendingCall, now: float) -> float | None:
        """Add a call; returns its deadline, ``None`` when it has none."""
        self._calls[call.number] = call
        if call.timeout_s <= 0:
            return None
        if len(self._deadlines) > 1000 and len(self._deadlines) > 4 * len(self._calls):
            # still a heap, as it is sorted
            self._deadlines = sorted(each for each in self._deadlines if each[1] in self._calls)
        heapq.heappush(self._deadlines, (now + call.timeout_s, call.number))
        return now + call.timeout_s

    def find(self, number: int, peer: object) -> PendingCall | None:
        """The call of this number to ``peer``; ``None`` when there is none."""
        call = self._calls.get(number)
        return call if call is not None and call.peer is peer else None

    def take(self, number: int, peer: object) -> PendingCall | None:
        """Remove and return the call of this number to ``peer``; ``None`` when there is none."""
        return None if self.find(number, peer) is None else self._calls.pop(number, None)

    def take_all(self, peer: object = None) -> list[PendingCall]:
        """Remove and return all calls, or those to ``peer``."""
        calls = [call for call in tuple(self._calls.values()) if peer is None or call.peer is peer]
        return [call for call in calls if self._calls.pop(call.number, None)]

    def expire(self, now: float) -> list[PendingCall]:
        """Remove and return the calls whose deadline is over."""
        late = []
        heap = self._deadlines
        while heap and (heap[0][0] <= now or heap[0][1] not in self._calls):
            call = self._calls.pop(heapq.heappop(heap)[1], None)
            if call is not None:
                late.append(call)
        return late

    def next_deadline(self) -> float | None:
        """The earliest time at which ``expire`` has something to do."""
        return self._deadlines[0][0] if self._deadlines else None
