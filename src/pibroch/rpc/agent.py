"""The shell around the protocol: one agent a process, which sends requests and serves those of others."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from pibroch.errors import (
    NotAllowedError,
    ProtocolError,
    RpcError,
    RpcTimeoutError,
    UnknownWorkerError,
    WorkerLostError,
)
from pibroch.rpc.callables import Callables
from pibroch.rpc.calls import PendingCall, PendingCalls, Receiver
from pibroch.rpc.connection import Connection, Message
from pibroch.rpc.failures import decode_failure, encode_failure
from pibroch.rpc.frames import Kind
from pibroch.rpc.futures import Future, Waiter
from pibroch.rpc.info import IdSource, WorkerInfo
from pibroch.rpc.membership import Membership, Rendezvous
from pibroch.rpc.messages import Answer, BodyDecoder, Call, encode
from pibroch.rpc.options import UNSET_RPC_TIMEOUT, RpcBackendOptions
from pibroch.rpc.packing import Packer
from pibroch.rpc.peers import Peers
from pibroch.rpc.pool import Pool
from pibroch.rpc.reactor import Reactor
from pibroch.rpc.values import Codec

if TYPE_CHECKING:
    from pibroch.rpc.autograd.engine import Autograd
    from pibroch.rpc.departure import Departure
    from pibroch.rpc.rref import References

log = logging.getLogger(__name__)

Handler = Callable[[WorkerInfo, Any, Any], object]
_ANSWER_BODY = msgspec.Raw(encode(Answer()))
_SHORT_S = 0.0002  # functions that take less run on the network thread
_END_S = 2.0  # threads of the pool have this long to finish


class Agent:
    """Everything that this process says to other workers and hears from them (docs/design/0003-tensor-rpc.md, Interfaces)."""

    def __init__(
        self,
        name: str,
        rendezvous: Rendezvous,
        options: RpcBackendOptions,
        callables: Callables,
        secret: bytes,
        reference_type: type | None = None,
    ) -> None:
        self.options, self.callables = options, callables
        self.ids = IdSource()
        self.departure: Departure | None = None
        self.reactor = Reactor(f"rpc-{name}")
        self.pool = Pool(f"rpc-{name}-worker", options.num_worker_threads, self.reactor)
        self._packer = Packer(Codec(callables, options.allow_pickle, reference_type), options.device_maps)
        self._bodies = BodyDecoder()
        self._handlers: dict[type, tuple[Handler, bool]] = {}
        self._calls, self._calls_lock = PendingCalls(), threading.Lock()
        self._planned = float("inf")  # when the deadlines are looked at next
        self._numbers = itertools.count(1)
        self.num_started = 0  # requests in this worker's life
        self._num_running = 0  # messages of others at work here
        self._running_lock = threading.Lock()
        self._mean_s: dict[str, float] = {}  # how long functions took lately
        self._closed_callbacks: list[Callable[[], None]] = []
        self._is_closed = False
        self._membership = Membership(rendezvous)
        self.info = WorkerInfo(name, rendezvous.rank if rendezvous.rank >= 0 else self._membership.new_id())
        host = options.bind or rendezvous.bind_host()
        self._peers = Peers(
            self.info,
            options,
            secret,
            self.reactor,
            self.pool,
            self._membership,
            host,
            self._on_message,
            self._on_failure,
            self._fail_calls_of,
        )
        self.incarnation = self._peers.incarnation

    # its parts

    @property
    def references(self) -> References | None:
        """The remote references of this worker."""
        return self._packer.references  # type: ignore[return-value]

    @references.setter
    def references(self, references: References) -> None:
        self._packer.references = references

    @property
    def autograd(self) -> Autograd | None:
        """The distributed autograd of this worker."""
        return self._packer.recorder  # type: ignore[return-value]

    @autograd.setter
    def autograd(self, autograd: Autograd) -> None:
        self._packer.recorder = autograd

    # life

    def start(self) -> None:
        """Listen, and join the others.

        Raises:
            RpcTimeoutError: when not all workers come in time.
            ConfigError: when the name is taken.
        """
        self.reactor.start()
        try:
            self._membership.join(self._peers.record)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Say goodbye and stop. What still waits fails."""
        if self._is_closed:
            return
        self._is_closed = True
        for callback in self._closed_callbacks:
            callback()
        self._peers.close()
        for call in self._calls.take_all():
            call.receiver.fail(WorkerLostError(self.info.name, "this worker was shut down"))
        self.reactor.stop()
        self.pool.close(_END_S)
        with contextlib.suppress(RuntimeError):  # the host of the store may be gone already
            self._membership.leave(self._peers.record)

    def when_lost(self, callback: Callable[[WorkerInfo, int], None]) -> None:
        """Call ``callback(worker, incarnation)`` on the loop when a worker is lost, leaves or cannot be reached."""
        self._peers.when_lost(callback)

    def when_closed(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` when this agent is closed, before its connections are."""
        self._closed_callbacks.append(callback)

    # who is there

    def find(self, to: str | int | WorkerInfo) -> WorkerInfo:
        """The worker of this name or id.

        Raises:
            UnknownWorkerError: when there is none.
        """
        if isinstance(to, WorkerInfo):
            return to
        info = self._membership.infos.get(to)
        if info is not None:
            return info
        record = self._membership.find_id(to) if isinstance(to, int) else self._membership.find(to)
        if record is None:
            known = ", ".join(info.name for info in self.workers())
            raise UnknownWorkerError(f"worker {to!r}", f"one that has joined ({known})", "see its init_rpc")
        return record.info

    def workers(self) -> list[WorkerInfo]:
        """All workers that this one has met."""
        return self._membership.known()

    def reach(self, worker: WorkerInfo) -> None:
        """Dial a worker if there is no connection to it; if it cannot be reached, it is lost."""
        self._peers.to(worker)

    def incarnation_of(self, to: WorkerInfo) -> int:
        """The life of a worker that this one talks to at present, 0 before it knows."""
        return self._peers.incarnation_of(to)

    # sending

    def request(
        self,
        to: WorkerInfo,
        body: msgspec.Struct,
        value: object = None,
        *,
        timeout: float = UNSET_RPC_TIMEOUT,
        context: int | None = None,
    ) -> Future:
        """Ask ``to``; the future is done when it has answered, failed, was lost or took too long. Does not block."""
        future = self.future()
        self.ask(future, to, body, value, self.timeout_s(timeout), context)
        return future

    def request_sync(
        self,
        to: WorkerInfo,
        body: msgspec.Struct,
        value: object = None,
        *,
        timeout: float = UNSET_RPC_TIMEOUT,
        context: int | None = None,
    ) -> Any:
        """Ask ``to`` and wait for the answer."""
        waiter, timeout_s = Waiter(), self.timeout_s(timeout)
        connection = self.ask(waiter, to, body, value, timeout_s, context)
        return waiter.wait(self.pool, timeout_s, connection.only_stream if connection is not None else None)

    def notify(self, to: WorkerInfo, body: msgspec.Struct, value: object = None, *, context: int | None = None) -> None:
        """Tell ``to`` something that needs no answer. Does not block; when the worker is lost the note is, too."""
        if self._is_closed:
            return
        packed = msgspec.Raw(encode(body))
        if to.id == self.info.id:
            message = self._packer.to_myself(self.info, Kind.NOTE, 0, packed, value, context)
            self.reactor.call_soon(lambda: self._on_message(None, message))
            return
        connection = self._peers.to(to)
        self._packer.send(connection, Kind.NOTE, 0, packed, [value], context)

    def call_soon(self, function: Callable[[], None]) -> None:
        """Run ``function`` on the loop; takes no lock, may be called from anywhere."""
        if not self._is_closed:
            self.reactor.call_soon(function)

    def submit(self, function: Callable[[], None]) -> None:
        """Run ``function`` on a thread of the pool."""
        self.pool.submit(function)

    def timeout_s(self, timeout: float) -> float:
        """The timeout in force, in seconds, 0 for none."""
        return self.options.rpc_timeout if timeout == UNSET_RPC_TIMEOUT else max(0.0, timeout)

    def wait(self, future: torch.futures.Future[Any], timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """The value of a future that something here will complete; another thread of the pool may work meanwhile.

        Raises:
            RpcTimeoutError: when it is not there in time.
        """
        timeout_s = self.timeout_s(timeout)
        if not future.done():
            done = threading.Event()
            future.add_done_callback(lambda _: done.set())
            token = self.pool.begin_wait()
            try:
                if not done.wait(timeout_s or None):
                    raise _too_late(timeout_s)
            finally:
                self.pool.end_wait(token)
        return future.wait()

    def future(self) -> Future:
        """One that a receiver of an answer completes."""
        return Future(self.pool, self.reactor)

    def current_context(self) -> int | None:
        """The distributed autograd context of the calling thread."""
        recorder = self._packer.recorder
        return recorder.current_context() if recorder is not None else None

    def ask(
        self,
        receiver: Receiver,
        to: WorkerInfo,
        body: msgspec.Struct,
        value: object,
        timeout_s: float,
        context: int | None,
    ) -> Connection | None:
        """Ask ``to``; ``receiver`` gets what comes of it. The timeout is in seconds, 0 for none. Returns where it was sent."""
        if self._is_closed:
            raise RuntimeError("RPC was shut down")
        number = next(self._numbers)
        packed = msgspec.Raw(encode(body))
        if to.id == self.info.id:
            message = self._packer.to_myself(to, Kind.REQUEST, number, packed, value, context)
            self._expect(PendingCall(number, self, receiver, timeout_s, context))
            self.reactor.call_soon(lambda: self._on_message(None, message))
            return None
        connection = self._peers.to(to)
        call = PendingCall(number, connection, receiver, timeout_s, context)
        self._packer.send(connection, Kind.REQUEST, number, packed, [value], context, lambda: self._expect(call))
        if connection.is_lost:
            self._fail_calls_of(connection, "the connection was lost")
        return connection

    def _expect(self, call: PendingCall) -> None:
        with self._calls_lock:
            self.num_started += 1
            deadline = self._calls.add(call, time.monotonic())
            if deadline is None or deadline >= self._planned:
                return
            self._planned = deadline
        self.reactor.call_at(deadline, self._expire)

    def _expire(self) -> None:
        with self._calls_lock:
            late = self._calls.expire(time.monotonic())
            following = self._calls.next_deadline()
            self._planned = float("inf") if following is None else following
        if following is not None:
            self.reactor.call_at(following, self._expire)
        for call in late:
            call.receiver.fail(_too_late(call.timeout_s))

    # serving

    def serve(self, body_type: type[msgspec.Struct], handler: Handler, *, in_pool: bool = False) -> None:
        """Have messages with such a body handled: on the loop, or on a thread of the pool."""
        self._bodies.add(body_type)
        self._handlers[body_type] = (handler, in_pool)

    def is_busy(self, but: int = 0) -> bool:
        """Whether it waits for an answer or works on one; ``but`` so many of those at work do not count."""
        return len(self._calls) > 0 or self._num_running > but

    def _on_message(self, connection: Connection | None, message: Message) -> None:
        """On the loop."""
        if message.kind == Kind.ANSWER:
            self._on_answer(connection, message)
            return
        if self._is_closed:
            return  # who asked will see that this worker has left
        origin = self.info if connection is None else connection.peer
        try:
            references = self._packer.references_in(message.envelope, origin)
            body = self._bodies.decode(message.envelope.body)
            handler, in_pool = self._handlers[type(body)]
        except RpcError as error:
            log.warning("a message of worker %r that cannot be understood: %s", origin.name, error)
            self._answer_failure(connection, message, error)
            return
        with self._running_lock:
            self._num_running += 1
        task = _Task(self, connection, origin, message, references, body, handler)
        if not in_pool:
            task()
        elif type(body) is Call and self._is_short(body.function):
            self.reactor.complete(task)
        else:
            self.pool.submit(task)

    def _is_short(self, function: str) -> bool:
        """Whether handing a function to another thread would take as long as the function."""
        return self._mean_s.get(function, 1.0) < _SHORT_S

    def note_duration(self, function: str, seconds: float) -> None:
        """Remember how long a function took."""
        mean_s = self._mean_s.get(function, 10 * _SHORT_S)
        self._mean_s[function] = mean_s + (seconds - mean_s) / 4

    def _on_answer(self, connection: Connection | None, message: Message) -> None:
        call = self._calls.take(message.number, connection or self)
        origin = self.info if connection is None else connection.peer
        try:
            references = self._packer.references_in(message.envelope, origin)
            if call is None:
                log.debug("an answer that came too late")
                return
            value = self._packer.unpack(message, origin, references)
        except Exception as error:
            if call is not None:
                call.receiver.fail(error)
            return
        call.receiver.succeed(value)

    def _on_failure(self, connection: Connection, number: int, metadata: bytes) -> None:
        call = self._calls.take(number, connection)
        if call is not None:
            call.receiver.fail(decode_failure(metadata, connection.peer, self.callables))

    def _fail_calls_of(self, connection: Connection, reason: str) -> None:
        for call in self._calls.take_of(connection):
            call.receiver.fail(connection.refusal or WorkerLostError(connection.peer.name, reason))

    def unpack(self, message: Message, origin: WorkerInfo, references: list[Any]) -> Any:
        """The value of a message that is being handled."""
        return self._packer.unpack(message, origin, references)

    def finish(self, connection: Connection | None, message: Message, box: list[object]) -> None:
        """A message was handled: answer it with the value in the box, if it was a request."""
        context = message.envelope.context
        try:
            if message.kind != Kind.REQUEST:
                return
            if connection is None:
                number, value = message.number, box.pop()
                answer = self._packer.to_myself(self.info, Kind.ANSWER, number, _ANSWER_BODY, value, context)
                self._on_answer(None, answer)
            else:
                self._packer.send(connection, Kind.ANSWER, message.number, _ANSWER_BODY, box, context)
        except Exception as error:
            self._answer_failure(connection, message, error)
        finally:
            with self._running_lock:
                self._num_running -= 1

    def finish_failed(self, connection: Connection | None, message: Message, error: BaseException) -> None:
        """A message could not be handled: answer with the error, if it was a request."""
        if message.kind == Kind.REQUEST:
            if isinstance(error, ProtocolError | NotAllowedError):
                origin = self.info if connection is None else connection.peer
                log.warning("refused a request of worker %r: %s", origin.name, error)
            self._answer_failure(connection, message, error)
        else:
            log.error("a note could not be handled", exc_info=error)
        with self._running_lock:
            self._num_running -= 1

    def _answer_failure(self, connection: Connection | None, message: Message, error: BaseException) -> None:
        if message.kind != Kind.REQUEST:
            return
        metadata = encode_failure(error)
        if connection is not None:
            connection.send(Kind.FAILURE, message.number, metadata)
            return
        call = self._calls.take(message.number, self)
        if call is not None:
            call.receiver.fail(decode_failure(metadata, self.info, self.callables))


class _Task:
    """One message being handled."""

    __slots__ = ("agent", "body", "connection", "handler", "message", "origin", "references")

    def __init__(
        self,
        agent: Agent,
        connection: Connection | None,
        origin: WorkerInfo,
        message: Message,
        references: list[Any],
        body: msgspec.Struct,
        handler: Handler,
    ) -> None:
        self.agent, self.connection, self.origin, self.message = agent, connection, origin, message
        self.references, self.body, self.handler = references, body, handler

    def __call__(self) -> None:
        agent = self.agent
        try:
            box = [self._run()]
        except Exception as error:
            agent.finish_failed(self.connection, self.message, error)
            return
        if isinstance(box[0], torch._C.Future):
            box[0].add_done_callback(self._finish_later)
        else:
            agent.finish(self.connection, self.message, box)

    def _run(self) -> object:
        context = self.message.envelope.context
        began = time.monotonic()
        if context is None or self.agent.autograd is None:
            result = self.handler(self.origin, self.body, self._value())
        else:
            with self.agent.autograd.entered(context):
                result = self.handler(self.origin, self.body, self._value())
        if type(self.body) is Call:
            self.agent.note_duration(self.body.function, time.monotonic() - began)
        return result

    def _value(self) -> Any:
        references, self.references = self.references, []
        return self.agent.unpack(self.message, self.origin, references)

    def _finish_later(self, future: torch.futures.Future[Any]) -> None:
        try:
            box = [future.value()]
        except Exception as error:
            self.agent.finish_failed(self.connection, self.message, error)
            error.__traceback__ = None  # the future keeps the error, and would keep all these frames
            return
        self.agent.finish(self.connection, self.message, box)


def _too_late(timeout_s: float) -> RpcTimeoutError:
    return RpcTimeoutError(
        f"no answer within the timeout of {timeout_s:g} s",
        "one in time",
        "raise the timeout of this call or of init_rpc, or see the callee's log",
    )


_current: Agent | None = None


def current_agent() -> Agent:
    """This process's agent.

    Raises:
        RuntimeError: when RPC is not initialised.
    """
    if _current is None:
        raise RuntimeError("RPC has not been initialized. Call init_rpc before using RPC functions.")
    return _current


def set_current_agent(agent: Agent | None) -> None:
    """Make ``agent`` this process's."""
    global _current
    _current = agent


os.register_at_fork(after_in_child=lambda: set_current_agent(None))
