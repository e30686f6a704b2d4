"""Requests of this worker to others, and their outcomes: answer, failure, loss or timeout.

What they say is others' business: ``agent.py`` sends Python values, ``rpc/rows.py`` rows.

Threads: ``expect`` is called from any thread; answers are handled where frames are read, on the
loop or in a caller that reads its own answer; deadlines by the loop's timer. ``_lock`` guards the
numbers and deadlines. The thread that takes a call out of the table of pending calls completes it.
"""

from __future__ import annotations

import math
import threading
import time

from pibroch.errors import RpcTimeoutError, WorkerLostError
from pibroch.rpc.calls.pending import PendingCall, PendingCalls, Receiver
from pibroch.rpc.info import WorkerInfo
from pibroch.rpc.transport.connection import Connection
from pibroch.rpc.values.callables import Callables
from pibroch.rpc.values.failures import decode_failure
from pibroch.wire.reactor import Reactor


class Requests:
    """Requests under way.

    Args:
        me: this worker.
        reactor: the loop, which checks the deadlines.
        callables: resolves types of exceptions in answers.
    """

    def __init__(self, me: WorkerInfo, reactor: Reactor, callables: Callables) -> None:
        self._me = me
        self._reactor = reactor
        self._callables = callables
        self._calls = PendingCalls()
        self._lock = threading.Lock()
        self._planned = math.inf  # when the deadlines are checked next
        self.num_started = 0  # since this worker joined; the number of the last one

    @property
    def num_pending(self) -> int:
        """The number of requests that wait for their answers."""
        return len(self._calls)

    def expect(self, connection: Connection, receiver: Receiver, timeout_s: float) -> int:
        """The number of a request that is to be sent next, whose outcome ``receiver`` gets.

        ``timeout_s`` of 0 means none.
        """
        with self._lock:
            self.num_started += 1
            call = PendingCall(self.num_started, connection, receiver, timeout_s)
            deadline = self._calls.add(call, time.monotonic()) or math.inf
            is_next = deadline < self._planned
            self._planned = min(self._planned, deadline)
        if is_next:
            self._reactor.call_at(deadline, self._expire)
        if connection.is_lost:  # perhaps before the request was listed
            self.lose(connection, connection.loss)
        return call.number

    def taken(self, connection: Connection, number: int) -> PendingCall | None:
        """The request that an answer is for, which no longer waits; ``None`` when it came late."""
        return self._calls.take(number, connection)

    def receiver(self, connection: Connection, number: int) -> Receiver | None:
        """Of a request that still waits."""
        call = self._calls.find(number, connection)
        return None if call is None else call.receiver

    def on_failure(self, connection: Connection, number: int, metadata: bytes) -> None:
        """Handle an error in place of an answer."""
        call = self.taken(connection, number)
        if call is not None:
            call.receiver.fail(decode_failure(metadata, connection.peer, self._callables))

    def lose(self, connection: Connection, reason: str) -> None:
        """Fail all requests on a connection that is lost."""
        for call in self._calls.take_all(connection):
            call.receiver.fail(connection.refusal or WorkerLostError(connection.peer.name, reason))

    def lose_all(self, reason: str) -> None:
        """Fail all requests."""
        for call in self._calls.take_all():
            call.receiver.fail(WorkerLostError(self._me.name, reason))

    def _expire(self) -> None:
        with self._lock:
            late = self._calls.expire(time.monotonic())
            following = self._calls.next_deadline()
            self._planned = math.inf if following is None else following
        if following is not None:
            self._reactor.call_at(following, self._expire)
        for call in late:
            assert isinstance(call.peer, Connection)
            call.receiver.fail(too_late(call.timeout_s, call.peer.peer.name))


def too_late(timeout_s: float, worker: str | None = None) -> RpcTimeoutError:
    """The error of a caller that has waited for so long, for ``worker`` if that is given."""
    whose = "no answer" if worker is None else f"no answer of worker {worker!r}"
    return RpcTimeoutError(
        f"{whose} within the timeout of {timeout_s:g} s",
        "one in time",
        "raise the timeout of this call or of init_rpc, or see the callee's log",
    )
