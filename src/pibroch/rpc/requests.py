"""What this worker asks of others, and what comes of it: an answer, a failure, a loss, or nothing in time."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable

import msgspec

from pibroch.errors import RpcTimeoutError, WorkerLostError
from pibroch.rpc.callables import Callables
from pibroch.rpc.calls import PendingCall, PendingCalls, Receiver
from pibroch.rpc.connection import Connection, Message
from pibroch.rpc.failures import decode_failure
from pibroch.rpc.frames import Kind
from pibroch.rpc.info import WorkerInfo
from pibroch.rpc.messages import encode
from pibroch.rpc.packing import Packer
from pibroch.rpc.reactor import Reactor

log = logging.getLogger(__name__)


class Requests:
    """Requests under way, and notes. Everywhere a connection of ``None`` leads to this worker itself.

    Args:
        me: this worker.
        packer: makes messages of bodies and values, and values of answers.
        reactor: the loop, which looks at the deadlines.
        callables: for types of exceptions that come back.
        deliver: called on the loop with each message of this worker to itself.
    """

    def __init__(
        self,
        me: WorkerInfo,
        packer: Packer,
        reactor: Reactor,
        callables: Callables,
        deliver: Callable[[Connection | None, Message], None],
    ) -> None:
        self._me, self._packer, self._reactor, self._callables = me, packer, reactor, callables
        self._deliver = deliver
        self._calls, self._lock = PendingCalls(), threading.Lock()
        self._numbers = itertools.count(1)
        self._planned = float("inf")  # when the deadlines are looked at next
        self.num_started = 0  # in this worker's life

    @property
    def num_pending(self) -> int:
        """Requests that wait for their answers."""
        return len(self._calls)

    def ask(
        self,
        connection: Connection | None,
        receiver: Receiver,
        body: msgspec.Struct,
        value: object,
        timeout_s: float,
        context: int | None,
    ) -> None:
        """Send a request; ``receiver`` gets what comes of it. The timeout is in seconds, 0 for none."""
        number = next(self._numbers)
        packed = msgspec.Raw(encode(body))
        call = PendingCall(number, connection or self, receiver, timeout_s, context)
        if connection is None:
            message = self._packer.to_myself(self._me, Kind.REQUEST, number, packed, value, context)
            self._expect(call)
            self._reactor.call_soon(lambda: self._deliver(None, message))
            return
        self._packer.send(connection, Kind.REQUEST, number, packed, [value], context, lambda: self._expect(call))
        if connection.is_lost:
            self.lose(connection, connection.loss)

    def tell(self, connection: Connection | None, body: msgspec.Struct, value: object, context: int | None) -> None:
        """Send a note, which has no answer."""
        packed = msgspec.Raw(encode(body))
        if connection is None:
            message = self._packer.to_myself(self._me, Kind.NOTE, 0, packed, value, context)
            self._reactor.call_soon(lambda: self._deliver(None, message))
        else:
            self._packer.send(connection, Kind.NOTE, 0, packed, [value], context)

    def on_answer(self, connection: Connection | None, message: Message) -> None:
        """The answer to one of them has come."""
        call = self._calls.take(message.number, connection or self)
        origin = self._me if connection is None else connection.peer
        try:
            references = self._packer.references_in(
                message.envelope, origin, connection.incarnation if connection else 0
            )
            if call is None:
                log.debug("an answer that came too late")
                return
            value = self._packer.unpack(message, origin, references)
        except Exception as error:
            if call is not None:
                call.receiver.fail(error)
            return
        call.receiver.succeed(value)

    def on_failure(self, connection: Connection | None, number: int, metadata: bytes) -> None:
        """The answer to one of them is an error."""
        call = self._calls.take(number, connection or self)
        if call is not None:
            origin = self._me if connection is None else connection.peer
            call.receiver.fail(decode_failure(metadata, origin, self._callables))

    def lose(self, connection: Connection, reason: str) -> None:
        """Nothing will come through this connection any more."""
        for call in self._calls.take_of(connection):
            call.receiver.fail(connection.refusal or WorkerLostError(connection.peer.name, reason))

    def lose_all(self, reason: str) -> None:
        """Nothing will come at all."""
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
            peer = call.peer.peer if isinstance(call.peer, Connection) else self._me
            call.receiver.fail(too_late(call.timeout_s, peer.name))


def too_late(timeout_s: float, worker: str | None = None) -> RpcTimeoutError:
    """The error of who has waited so long, for this worker if it is known."""
    whose = "no answer" if worker is None else f"no answer of worker {worker!r}"
    return RpcTimeoutError(
        f"{whose} within the timeout of {timeout_s:g} s",
        "one in time",
        "raise the timeout of this call or of init_rpc, or see the callee's log",
    )
