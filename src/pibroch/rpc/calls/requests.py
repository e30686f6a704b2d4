"""Requests of this worker to others, and their outcomes: answer, failure, loss or timeout.

Threads: ``ask`` and ``notify`` are called from any thread; answers are handled where frames are
read, on the loop or in a caller that reads its own answer; deadlines by the loop's timer. ``_lock``
guards the deadlines. The thread that takes a call out of the table of pending calls completes it.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time

import msgspec

from pibroch.errors import RpcTimeoutError, WorkerLostError
from pibroch.rpc.calls.packing import Packer
from pibroch.rpc.calls.pending import PendingCall, PendingCalls, Receiver
from pibroch.rpc.info import WorkerInfo
from pibroch.rpc.transport.connection import Connection, Message
from pibroch.rpc.transport.frames import Kind
from pibroch.rpc.values.callables import Callables
from pibroch.rpc.values.failures import decode_failure
from pibroch.rpc.values.messages import encode
from pibroch.wire.reactor import Reactor

log = logging.getLogger(__name__)


class Requests:
    """Requests under way, and notes.

    Args:
        me: this worker.
        packer: makes messages of bodies and values, and values of answers.
        reactor: the loop, which checks the deadlines.
        callables: resolves types of exceptions in answers.
    """

    def __init__(
        self, me: WorkerInfo, packer: Packer, reactor: Reactor, callables: Callables
    ) -> None:
        self._me = me
        self._packer = packer
        self._reactor = reactor
        self._callables = callables
        self._calls = PendingCalls()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._planned = float("inf")  # when the deadlines are checked next
        self.num_started = 0  # since this worker joined

    @property
    def num_pending(self) -> int:
        """The number of requests that wait for their answers."""
        return len(self._calls)

    def ask(
        self,
        connection: Connection,
        receiver: Receiver,
        body: msgspec.Struct,
        value: object,
        timeout_s: float,
        context: int | None,
    ) -> None:
        """Send a request, whose outcome ``receiver`` gets; ``timeout_s`` of 0 means none."""
        number = next(self._numbers)
        packed = msgspec.Raw(encode(body))
        call = PendingCall(number, connection, receiver, timeout_s, context)
        self._packer.send(
            connection, Kind.REQUEST, number, packed, value, context, lambda: self._expect(call)
        )
        if connection.is_lost:
            self.lose(connection, connection.loss)

    def notify(
        self, connection: Connection, body: msgspec.Struct, value: object, context: int | None
    ) -> None:
        """Send a note, which has no answer."""
        packed = msgspec.Raw(encode(body))
        self._packer.send(connection, Kind.NOTE, 0, packed, value, context)

    def taken(self, connection: Connection, number: int) -> PendingCall | None:
        """The request that an answer is for, which no longer waits; ``None`` when it came late."""
        return self._calls.take(number, connection)

    def on_answer(self, connection: Connection, message: Message) -> None:
        """Handle the answer to a request."""
        call = self.taken(connection, message.number)
        origin = connection.peer
        try:
            references = self._packer.references_in(
                message.envelope, origin, connection.incarnation
            )
            if call is None:
                log.debug("an answer that arrived too late")
                return
            value = self._packer.unpack(message, origin, references)
        except Exception as error:
            if call is not None:
                call.receiver.fail(error)
            return
        call.receiver.succeed(value)

    def on_failure(self, connection: Connection, number: int, metadata: bytes) -> None:
        """Handle an error in place of an answer."""
        call = self._calls.take(number, connection)
        if call is not None:
            call.receiver.fail(decode_failure(metadata, connection.peer, self._callables))

    def lose(self, connection: Connection, reason: str) -> None:
        """Fail all requests on a connection that is lost."""
        for call in self._calls.take_of(connection):
            call.receiver.fail(connection.refusal or WorkerLostError(connection.peer.name, reason))

    def lose_all(self, reason: str) -> None:
        """Fail all requests."""
        for call in self._calls.take_all():
            call.receiver.fail(WorkerLostError(self._me.name, reason))

    def _expect(self, call: PendingCall) -> None:
        with self._lock:
            self.num_started += 1
            deadline = self._calls.add(call, time.monotonic())
            if deadline is None or deadline >= self._planned:
                return
            self._planned = deadline
        self._reactor.call_at(deadline, self._expire)

    def _expire(self) -> None:
        with self._lock:
            late = self._calls.expire(time.monotonic())
            following = self._calls.next_deadline()
            self._planned = float("inf") if following is None else following
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
