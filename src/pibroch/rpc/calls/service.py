"""Requests and notes of other workers: from a message to its handler, its thread, its answer.

Threads: ``on_message`` runs where frames are handled, on the loop or in a caller that reads its own
answer. The handler runs there too, or at the end of a round of the loop (functions that were short
lately), or on the pool. The answer is sent by the thread that has the result. ``_running_lock``
guards the counts of messages at work.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, reduce
from operator import or_
from typing import Any

import msgspec
import torch

from pibroch.errors import NotAllowedError, ProtocolError, RpcError
from pibroch.rpc.calls.packing import Packer
from pibroch.rpc.calls.pool import Pool
from pibroch.rpc.info import WorkerInfo
from pibroch.rpc.options import Limits
from pibroch.rpc.transport.connection import Connection, Message
from pibroch.rpc.transport.frames import Kind
from pibroch.rpc.values.failures import encode_failure
from pibroch.rpc.values.messages import Answer, Call, encode
from pibroch.wire.reactor import Reactor

log = logging.getLogger(__name__)

Handler = Callable[[WorkerInfo, Any, Any], object]
IncarnationOf = Callable[[Any], int]
_ANSWER_BODY = msgspec.Raw(encode(Answer()))
_OUT_OF_CONTEXT = nullcontext()
_SHORT_S = 0.0002  # functions that take less run on the network thread


class RequestService:
    """Handles requests and notes.

    Args:
        packer: makes values of messages, and answers of values.
        reactor: the loop; runs internal handlers, and functions that were short lately.
        pool: runs all other functions.
        limits: on what one other worker may have under way here.
    """

    def __init__(self, packer: Packer, reactor: Reactor, pool: Pool, limits: Limits) -> None:
        self._packer = packer
        self._reactor = reactor
        self._pool = pool
        self._limits = limits
        self._handlers: dict[type, tuple[Handler, bool, IncarnationOf | None]] = {}
        self._mean_s: dict[str, float] = {}  # by function, how long it took lately
        self.num_running = 0  # messages that are being handled
        self._running_lock = threading.Lock()

    def serve(
        self,
        body_type: type[msgspec.Struct],
        handler: Handler,
        *,
        in_pool: bool = False,
        incarnation: IncarnationOf | None = None,
    ) -> None:
        """Register the handler of messages with such a body: on the loop, or on the pool.

        ``incarnation(body)`` is the sender's incarnation according to the body; it must be that of
        the connection.
        """
        self._handlers[body_type] = (handler, in_pool, incarnation)
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
            reduce(or_, self._handlers)
        )

    def on_message(self, connection: Connection, message: Message) -> None:
        """Handle a request or a note."""
        origin = connection.peer
        try:
            self._packer.receive_references(connection, message)
            body = self._body(message.envelope.body)
            handler, in_pool, incarnation = self._handlers[type(body)]
            if incarnation is not None and incarnation(body) != connection.incarnation:
                raise ProtocolError(
                    f"incarnation {incarnation(body)} of worker {origin.name!r}",
                    f"{connection.incarnation}",
                )
            is_many = (
                connection.is_overdue or connection.num_at_work >= connection.uncounted_requests
            )
            if is_many and message.kind == Kind.REQUEST:
                self._check_load(connection, message)
        except RpcError as error:
            log.warning("a message of worker %r that cannot be understood: %s", origin.name, error)
            self._answer_failure(connection, message, error)
            return
        with self._running_lock:
            self.num_running += 1
            connection.num_at_work += 1
            connection.bytes_at_work += message.num_bytes
        task = partial(self._handle, connection, message, body, handler)
        if not in_pool:
            task()
        elif type(body) is Call and self._is_short(body.function):
            self._reactor.complete(task)
        else:
            self._pool.submit(task)

    def _body(self, raw: msgspec.Raw) -> Any:
        """The body of a message.

        Raises:
            ProtocolError: when its type is not registered or its fields are wrong.
        """
        try:
            return self._decoder.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(
                f"a message that cannot be read ({error})", "one of the known messages"
            ) from error

    def _check_load(self, connection: Connection, message: Message) -> None:
        """Refuse a request of a worker with too much under way here, or with untaken answers."""
        limits = self._limits
        self._check_answers(connection)
        num_bytes = 0
        if connection.num_at_work >= connection.uncounted_requests:
            # of the storages, as there may be gaps between rows
            num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in message.tensors)
        if connection.num_at_work >= limits.requests:
            raise ProtocolError(
                f"one more request than the {limits.requests:,} that worker"
                f" {connection.peer.name!r} has under way here",
                f"at most {limits.requests:,}",
                "wait for some of them, or raise limits.requests",
            )
        if connection.bytes_at_work + num_bytes > limits.message_bytes:
            raise _too_much(connection.bytes_at_work + num_bytes, "under way", connection)
        message.num_bytes = num_bytes

    def _check_answers(self, connection: Connection) -> None:
        """Refuse to add to the answers that a worker does not take."""
        owed = connection.bytes_owed
        connection.is_overdue = owed > self._limits.message_bytes
        if connection.is_overdue:
            raise _too_much(owed, "sent back", connection)

    def _is_done(self, connection: Connection, message: Message) -> None:
        with self._running_lock:
            self.num_running -= 1
            connection.num_at_work -= 1
            connection.bytes_at_work -= message.num_bytes

    def _is_short(self, function: str) -> bool:
        """Whether passing a function to another thread would take as long as the function."""
        return self._mean_s.get(function, 1.0) < _SHORT_S

    def _note_duration(self, function: str, seconds: float) -> None:
        """Update the mean duration of a function."""
        mean_s = self._mean_s.get(function, 10 * _SHORT_S)
        self._mean_s[function] = mean_s + (seconds - mean_s) / 4

    def _handle(
        self, connection: Connection, message: Message, body: msgspec.Struct, handler: Handler
    ) -> None:
        """Handle a message, on the thread that is to do it."""
        origin = connection.peer
        context = message.envelope.context
        recorder = self._packer.recorder
        began = time.monotonic()
        try:
            with (
                _OUT_OF_CONTEXT
                if context is None or recorder is None
                else recorder.entered(context)
            ):
                value = handler(origin, body, self._packer.unpack(message, origin))
        except BaseException as error:  # also SystemExit: the caller must not wait in vain
            self._fail(connection, message, error)
            return
        if type(body) is Call:
            self._note_duration(body.function, time.monotonic() - began)
        if isinstance(value, torch._C.Future):
            value.add_done_callback(partial(self._finish_later, connection, message))
        else:
            self._finish(connection, message, value)

    def _finish_later(
        self, connection: Connection, message: Message, future: torch.futures.Future[Any]
    ) -> None:
        try:
            value = future.value()
        except Exception as error:
            self._fail(connection, message, error)
            # the future keeps the error, and would keep all these frames
            error.__traceback__ = None
            return
        self._finish(connection, message, value)

    def _finish(self, connection: Connection, message: Message, value: object) -> None:
        """Answer a request that was handled with ``value``; a note has no answer."""
        context = message.envelope.context
        try:
            if message.kind != Kind.REQUEST:
                return
            self._check_answers(connection)
            packed = self._packer.pack(connection, _ANSWER_BODY, value, context)
            self._packer.send(connection, Kind.ANSWER, message.number, packed)
        except Exception as error:
            self._answer_failure(connection, message, error)
        finally:
            self._is_done(connection, message)

    def _fail(self, connection: Connection, message: Message, error: BaseException) -> None:
        """Answer a request whose handler failed with the error; for a note, log it."""
        if message.kind == Kind.REQUEST:
            if isinstance(error, ProtocolError | NotAllowedError):
                log.warning("refused a request of worker %r: %s", connection.peer.name, error)
            self._answer_failure(connection, message, error)
        else:
            log.error("a note could not be handled", exc_info=error)
        self._is_done(connection, message)

    def _answer_failure(
        self, connection: Connection, message: Message, error: BaseException
    ) -> None:
        if message.kind == Kind.REQUEST:
            connection.send_failure(message.number, encode_failure(error))


def _too_much(num_bytes: int, where: str, connection: Connection) -> ProtocolError:
    return ProtocolError(
        f"tensors of {num_bytes:,} bytes {where} for worker {connection.peer.name!r}",
        f"at most {connection.limits.message_bytes:,} at once",
        "wait for some requests, take their answers and let them go, or raise limits.message_bytes",
    )
