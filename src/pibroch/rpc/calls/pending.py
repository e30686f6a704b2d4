"""Calls that wait for an outcome, with deadlines (pure: the time is an argument)."""

from __future__ import annotations

from collections import deque
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

    There is one queue of deadlines for each timeout, in which they are in order already: adding and
    finishing cost O(1). Finished calls leave their queue when they reach its head, or when most
    calls in it are finished.
    """

    def __init__(self) -> None:
        self._calls: dict[int, PendingCall] = {}
        self._queues: dict[float, deque[tuple[float, int]]] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: PendingCall, now: float) -> float | None:
        """Add a call; returns its deadline, ``None`` when it has none."""
        self._calls[call.number] = call
        if call.timeout_s <= 0:
            return None
        queue = self._queues.setdefault(call.timeout_s, deque())
        if len(queue) > 1000 and len(queue) > 4 * len(self._calls):
            queue = self._queues[call.timeout_s] = deque(
                entry for entry in tuple(queue) if entry[1] in self._calls
            )
        queue.append((now + call.timeout_s, call.number))
        return now + call.timeout_s

    def find(self, number: int, peer: object) -> PendingCall | None:
        """The call of this number to ``peer``; ``None`` when there is none."""
        call = self._calls.get(number)
        return call if call is not None and call.peer is peer else None

    def take(self, number: int, peer: object) -> PendingCall | None:
        """Remove and return the call of this number to ``peer``; ``None`` when there is none."""
        return None if self.find(number, peer) is None else self._calls.pop(number, None)

    def take_of(self, peer: object) -> list[PendingCall]:
        """Remove and return all calls to ``peer``."""
        numbers = [number for number, call in tuple(self._calls.items()) if call.peer is peer]
        return [call for number in numbers if (call := self._calls.pop(number, None))]

    def take_all(self) -> list[PendingCall]:
        """Remove and return all calls."""
        numbers = tuple(self._calls)
        return [call for number in numbers if (call := self._calls.pop(number, None))]

    def expire(self, now: float) -> list[PendingCall]:
        """Remove and return the calls whose deadline is over."""
        late = []
        for queue in tuple(self._queues.values()):
            while queue and (queue[0][0] <= now or queue[0][1] not in self._calls):
                call = self._calls.pop(queue.popleft()[1], None)
                if call is not None:
                    late.append(call)
        for timeout_s, queue in tuple(self._queues.items()):
            if not queue and len(self._queues) > 16:
                self._queues.pop(timeout_s, None)
        return late

    def next_deadline(self) -> float | None:
        """The earliest time at which ``expire`` has something to do."""
        heads = [queue[0][0] for queue in tuple(self._queues.values()) if queue]
        return min(heads, default=None)
