"""The shell around the protocol: one agent a process, which sends requests, serves those of others, and knows who is lost."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from pibroch.errors import ConfigError, PibrochError, ProtocolError, RpcError, RpcTimeoutError, WorkerLostError
from pibroch.rpc.callables import Callables
from pibroch.rpc.calls import PendingCall, PendingCalls, Receiver
from pibroch.rpc.connection import Connection, Message
from pibroch.rpc.failures import Failure, error_of, failure_of
from pibroch.rpc.frames import FrameReader, Kind
from pibroch.rpc.futures import Future, Waiter
from pibroch.rpc.handshake import Client, Identity, Purpose, Server
from pibroch.rpc.info import IdSource, WorkerInfo
from pibroch.rpc.link import Admission, Listener, dial, this_machine
from pibroch.rpc.membership import Membership, Record, Rendezvous
from pibroch.rpc.messages import Answer, BodyDecoder, Envelope, encode
from pibroch.rpc.options import UNSET_RPC_TIMEOUT, RpcBackendOptions
from pibroch.rpc.pool import Pool
from pibroch.rpc.reactor import Reactor
from pibroch.rpc.sharing import Sharing
from pibroch.rpc.stream import Stream
from pibroch.rpc.values import Codec

if TYPE_CHECKING:
    from pibroch.rpc.autograd.engine import Autograd
    from pibroch.rpc.departure import Departure
    from pibroch.rpc.rref import References

log = logging.getLogger(__name__)

Handler = Callable[[WorkerInfo, Any, Any], object]
_failure_decoder = msgspec.msgpack.Decoder(Failure)
_ANSWER_BODY = msgspec.Raw(encode(Answer()))
_FLUSH_S = 2.0  # what is queued when a worker leaves has this long to go


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
        self.options, self.callables, self._secret = options, callables, secret
        self.incarnation = secrets.randbits(62)
        self.ids = IdSource()
        self.references: References | None = None
        self.autograd: Autograd | None = None
        self.departure: Departure | None = None
        self._codec = Codec(callables, options.allow_pickle, reference_type)
        self._bodies = BodyDecoder()
        self._handlers: dict[type, tuple[Handler, bool]] = {}
        self._calls, self._calls_lock = PendingCalls(), threading.Lock()
        self._planned = float("inf")  # when the deadlines are looked at next
        self._numbers = itertools.count(1)
        self.num_started = 0  # requests in this worker's life
        self._num_running = 0  # messages of others at work here
        self._running_lock = threading.Lock()
        self._dialled: dict[int, Connection] = {}
        self._accepted: set[Connection] = set()
        self._connections_lock = threading.Lock()
        self._given_up: set[tuple[int, int]] = set()  # workers and incarnations that are lost
        self._lost_callbacks: list[Callable[[WorkerInfo, int], None]] = []
        self._closed_callbacks: list[Callable[[], None]] = []
        self._is_closed = False
        self._machine = this_machine()
        self.reactor = Reactor(f"rpc-{name}")
        self.pool = Pool(f"rpc-{name}-worker", options.num_worker_threads)
        self._membership = Membership(rendezvous)
        worker_id = rendezvous.rank if rendezvous.rank >= 0 else self._membership.new_id()
        self.info = WorkerInfo(name, worker_id)
        self._listeners: list[Listener] = []
        self._record = self._listen(options.bind or rendezvous.bind_host())

    # life

    def start(self) -> None:
        """Listen, and join the others.

        Raises:
            RpcTimeoutError: when not all workers come in time.
            ConfigError: when the name is taken.
        """
        self.reactor.start()
        try:
            self._membership.join(self._record)
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
        for connection in self._connections():
            connection.send(Kind.GOODBYE, 0, b"")
        deadline = time.monotonic() + _FLUSH_S
        while any(connection.num_queued for connection in self._connections()) and time.monotonic() < deadline:
            time.sleep(0.001)
        done = threading.Event()
        self.reactor.call_soon(lambda: self._close_all(done))
        done.wait(_FLUSH_S)
        self.reactor.stop()
        self.pool.close(_FLUSH_S)
        with contextlib.suppress(RuntimeError):  # the host of the store may be gone already
            self._membership.leave(self._record)

    def when_lost(self, callback: Callable[[WorkerInfo, int], None]) -> None:
        """Call ``callback(worker, incarnation)`` on the loop when a worker is lost or leaves."""
        self._lost_callbacks.append(callback)

    def when_closed(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` when this agent is closed, before its connections are."""
        self._closed_callbacks.append(callback)

    # who is there

    def find(self, to: str | int | WorkerInfo) -> WorkerInfo:
        """The worker of this name or id.

        Raises:
            ValueError: when there is none.
        """
        if isinstance(to, WorkerInfo):
            return to
        record = self._membership.find_id(to) if isinstance(to, int) else self._membership.find(to)
        if record is None:
            known = ", ".join(info.name for info in self.workers())
            raise ValueError(f"got worker {to!r}; need one that has joined ({known}); do: see its init_rpc")
        return record.info

    def workers(self) -> list[WorkerInfo]:
        """All workers that this one has met."""
        return self._membership.known()

    def incarnation_of(self, to: WorkerInfo) -> int:
        """The life of a worker that this one talks to at present, 0 before it knows."""
        if to.id == self.info.id:
            return self.incarnation
        connection = self._dialled.get(to.id)
        if connection is not None and connection.incarnation:
            return connection.incarnation
        return next((each.incarnation for each in tuple(self._accepted) if each.peer.id == to.id), 0)

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
        future = Future(self.pool)
        self.ask(future, to, body, value, timeout, context)
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
        waiter = Waiter()
        timeout_s = self.ask(waiter, to, body, value, timeout, context)
        return waiter.wait(self.pool, timeout_s)

    def ask(
        self,
        receiver: Receiver,
        to: WorkerInfo,
        body: msgspec.Struct,
        value: object,
        timeout: float,
        context: int | None,
    ) -> float:
        """Send a request whose outcome goes to ``receiver``; returns the timeout in force."""
        if self._is_closed:
            raise RuntimeError("RPC was shut down")
        timeout_s = self.timeout_s(timeout)
        number = next(self._numbers)
        if to.id == self.info.id:
            self._ask_myself(receiver, number, body, value, timeout_s, context)
            return timeout_s
        connection = self._connection_to(to)
        metadata, payload = self._pack(connection, body, [value], context)
        self._expect(PendingCall(number, connection, receiver, timeout_s, context))
        connection.send(Kind.REQUEST, number, metadata, payload)
        if connection.is_lost:
            self._fail_calls_of(connection, "the connection was lost")
        return timeout_s

    def notify(self, to: WorkerInfo, body: msgspec.Struct, value: object = None, *, context: int | None = None) -> None:
        """Tell ``to`` something that needs no answer. Does not block; when the worker is lost the note is, too."""
        if self._is_closed:
            return
        if to.id == self.info.id:
            message = self._message_to_myself(Kind.NOTE, 0, body, value, context)
            self.reactor.call_soon(lambda: self._on_message(None, message))
            return
        connection = self._connection_to(to)
        metadata, payload = self._pack(connection, body, [value], context)
        connection.send(Kind.NOTE, 0, metadata, payload)

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
            with self.pool.waiting():
                if not done.wait(timeout_s or None):
                    raise _too_late(timeout_s)
        return future.value() if isinstance(future, Future) else future.wait()

    def current_context(self) -> int | None:
        """The distributed autograd context of the calling thread."""
        return self.autograd.current_context() if self.autograd is not None else None

    # serving

    def serve(self, body_type: type[msgspec.Struct], handler: Handler, *, in_pool: bool = False) -> None:
        """Have messages with such a body handled: on the loop, or on a thread of the pool."""
        self._bodies.add(body_type)
        self._handlers[body_type] = (handler, in_pool)

    def is_busy(self, but: int = 0) -> bool:
        """Whether it waits for an answer or works on one; ``but`` so many of those at work do not count."""
        return len(self._calls) > 0 or self._num_running > but

    # sending, inside

    def _pack(
        self, connection: Connection, body: msgspec.Struct | msgspec.Raw, box: list[object], context: int | None
    ) -> tuple[bytes, list[Any]]:
        """A message's metadata and payload. ``box`` holds the value, and nothing else of ours does: it may be given back."""
        raw, tensors, references = self._codec.encode(box.pop())
        wires: list[Any] = []
        graph = None
        try:
            for reference in references:
                assert self.references is not None
                wires.append(self.references.send(reference, connection.peer))
            if context is not None and self.autograd is not None:
                graph, tensors = self.autograd.outgoing(context, connection.peer, tensors)
            infos, payload = connection.place(tensors)
        except BaseException:
            for wire in wires:
                assert self.references is not None
                self.references.unsend(wire)
            raise
        return encode(_envelope(body, raw, infos, context, graph, wires)), payload

    def _expect(self, call: PendingCall) -> None:
        with self._calls_lock:
            self.num_started += 1
            deadline = self._calls.add(call, time.monotonic())
            if deadline is None or deadline >= self._planned:
                return
            self._planned = deadline
        self.reactor.call_at(deadline, self._expire)

    def _expire(self) -> None:
        now = time.monotonic()
        with self._calls_lock:
            late = self._calls.expire(now)
            following = self._calls.next_deadline()
            self._planned = float("inf") if following is None else following
        if following is not None:
            self.reactor.call_at(following, self._expire)
        for call in late:
            call.receiver.fail(_too_late(call.timeout_s))

    # receiving, on the loop

    def _on_message(self, connection: Connection | None, message: Message) -> None:
        if message.kind == Kind.ANSWER:
            self._on_answer(message)
            return
        origin = self.info if connection is None else connection.peer
        try:
            references = self._receive_references(message.envelope, origin)
            body = self._bodies.decode(message.envelope.body)
            handler, in_pool = self._handlers[type(body)]
        except RpcError as error:
            log.warning("a message of worker %r that cannot be understood: %s", origin.name, error)
            self._answer_failure(connection, message, error)
            return
        with self._running_lock:
            self._num_running += 1
        task = _Task(self, connection, origin, message, references, body, handler)
        if in_pool:
            self.pool.submit(task)
        else:
            task()

    def _receive_references(self, envelope: Envelope, origin: WorkerInfo) -> list[Any]:
        """The references of a message, each of which counts from now on, whether the message is of use or not."""
        if not envelope.references or self.references is None:
            return []
        return [self.references.receive(wire, origin) for wire in envelope.references]

    def _on_answer(self, message: Message) -> None:
        call = self._calls.take(message.number)
        origin = call.peer.peer if call is not None and isinstance(call.peer, Connection) else self.info
        try:
            references = self._receive_references(message.envelope, origin)
            if call is None:
                log.debug("an answer that came too late")
                return
            value = self.decode(message, origin, references)
        except Exception as error:
            if call is not None:
                call.receiver.fail(error)
            return
        call.receiver.succeed(value)

    def decode(self, message: Message, origin: WorkerInfo, references: list[Any]) -> Any:
        """A message's value."""
        envelope, tensors = message.envelope, message.tensors
        message.tensors = []  # from here on the value alone holds them
        if envelope.graph is not None and self.autograd is not None:
            tensors = self.autograd.incoming(origin, envelope.graph, tensors)
        return self._codec.decode(envelope.value, tensors, references)

    def _on_failure(self, connection: Connection, number: int, metadata: bytes) -> None:
        call = self._calls.take(number)
        if call is not None:
            call.receiver.fail(self._error(metadata, connection.peer))

    def finish(self, connection: Connection | None, message: Message, box: list[object]) -> None:
        """Answer a request with the value in the box."""
        with self._running_lock:
            self._num_running -= 1
        if message.kind != Kind.REQUEST:
            return
        context = message.envelope.context
        try:
            if connection is None:
                self._on_answer(self._message_to_myself(Kind.ANSWER, message.number, _ANSWER_BODY, box.pop(), context))
                return
            metadata, payload = self._pack(connection, _ANSWER_BODY, box, context)
        except Exception as error:
            self._answer_failure(connection, message, error)
            return
        connection.send(Kind.ANSWER, message.number, metadata, payload)

    def finish_failed(self, connection: Connection | None, message: Message, error: BaseException) -> None:
        """Answer a request with an error."""
        with self._running_lock:
            self._num_running -= 1
        if message.kind == Kind.REQUEST:
            self._answer_failure(connection, message, error)
        else:
            log.error("a note could not be handled", exc_info=error)

    def _answer_failure(self, connection: Connection | None, message: Message, error: BaseException) -> None:
        if message.kind != Kind.REQUEST:
            return
        metadata = encode(failure_of(error))
        if connection is not None:
            connection.send(Kind.FAILURE, message.number, metadata)
            return
        call = self._calls.take(message.number)
        if call is not None:
            call.receiver.fail(self._error(metadata, self.info))

    def _error(self, metadata: bytes, origin: WorkerInfo) -> Exception:
        """What a callee raised."""
        try:
            return error_of(_failure_decoder.decode(metadata), origin, self.callables)
        except msgspec.MsgspecError as error:
            return ProtocolError(f"a failure of worker {origin.name!r} that cannot be read ({error})")

    # to itself

    def _ask_myself(
        self,
        receiver: Receiver,
        number: int,
        body: msgspec.Struct,
        value: object,
        timeout_s: float,
        context: int | None,
    ) -> None:
        message = self._message_to_myself(Kind.REQUEST, number, body, value, context)
        self._expect(PendingCall(number, self, receiver, timeout_s, context))
        self.reactor.call_soon(lambda: self._on_message(None, message))

    def _message_to_myself(
        self, kind: Kind, number: int, body: msgspec.Struct | msgspec.Raw, value: object, context: int | None
    ) -> Message:
        raw, tensors, references = self._codec.encode(value)
        wires = [self.references.send(each, self.info) for each in references] if self.references is not None else []
        graph = None
        if context is not None and self.autograd is not None:
            graph, tensors = self.autograd.outgoing(context, self.info, tensors)
        metadata = encode(_envelope(body, raw, [], context, graph, wires))
        return Message(kind, number, msgspec.msgpack.decode(metadata, type=Envelope), tensors)

    # connections

    def _connections(self) -> list[Connection]:
        with self._connections_lock:
            return [*self._dialled.values(), *self._accepted]

    def _connection_to(self, to: WorkerInfo) -> Connection:
        """The connection that this worker dialled to ``to``, or one that will be."""
        connection = self._dialled.get(to.id)
        if connection is not None:
            return connection
        with self._connections_lock:
            connection = self._dialled.get(to.id)
            if connection is None:
                connection = self._new_connection(to, 0)
                self._dialled[to.id] = connection
                self.pool.submit(lambda: self._look_up(connection))
        return connection

    def _new_connection(self, peer: WorkerInfo, incarnation: int) -> Connection:
        return Connection(peer, incarnation, self.options.limits, self._on_message, self._on_failure, self._on_lost)

    def _look_up(self, connection: Connection) -> None:
        """Find out where a worker is (on the pool: the store may take its time), then dial."""
        try:
            record = self._membership.find(connection.peer.name)
            reason = "nobody of that name has joined" if record is None else ""
        except RuntimeError as error:
            record, reason = None, f"the meeting place does not answer ({error})"
        self.reactor.call_soon(lambda: self._dial(connection, record, reason))

    def _dial(self, connection: Connection, record: Record | None, reason: str) -> None:
        if record is None:
            connection.lose(reason)
            return
        connection.incarnation = record.incarnation
        if self.options.shared_memory and record.unix is not None and record.machine == self._machine:
            self._share_memory(connection)
        core = Client(self._secret, self._identity(), record.name, Purpose(secrets.randbits(62)))
        try:
            sock = dial(record.address, self._machine if self.options.shared_memory else "", self.options.lost_after_s)
        except OSError as error:
            connection.lose(f"it does not listen any more ({error.strerror})")
            return

        def admitted(sock: socket.socket) -> None:
            connection.incarnation = core.peer.incarnation
            connection.open(lambda self_: self._stream(self_, sock), core.surplus)

        def refused(error: Exception) -> None:
            connection.refusal = error if isinstance(error, PibrochError) else None
            connection.lose(f"{error}")

        timeout_s = min(self.options.limits.handshake_s, self.options.lost_after_s)
        Admission(self.reactor, sock, core, timeout_s, admitted, refused)

    def _share_memory(self, connection: Connection) -> None:
        def discard(what: object) -> None:
            self.pool.submit(functools.partial(_drop, what))

        limit = self.options.limits.message_bytes
        connection.sharing = Sharing(self.reactor, connection.send_buffers, discard, limit)

    def _stream(self, connection: Connection, sock: socket.socket) -> Stream:
        limits = self.options.limits
        reader = FrameReader(limits.metadata_bytes, limits.message_bytes, connection.allocate)
        return Stream(self.reactor, sock, reader, connection.on_frame, connection.on_closed)

    def _listen(self, host: str) -> Record:
        unix = None
        if self.options.shared_memory:
            unix = f"pibroch-{self.incarnation:016x}"
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            sock.bind("\0" + unix)
            self._listeners.append(self._listener(sock))
        tcp = socket.socket(
            socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC
        )
        try:
            tcp.bind((host, 0))
        except OSError as error:
            raise ConfigError(
                f"address {host!r} to listen on ({error.strerror})", "one of this machine", "see the option bind"
            ) from error
        port = tcp.getsockname()[1]
        self._listeners.append(self._listener(tcp))
        return Record(self.info.name, self.info.id, self.incarnation, self._machine, unix, host, port)

    def _listener(self, sock: socket.socket) -> Listener:
        return Listener(
            self.reactor,
            sock,
            lambda: Server(self._secret, self._identity()),
            self._on_admitted,
            max_strangers=self.options.limits.waiting_strangers,
            handshake_s=self.options.limits.handshake_s,
            lost_after_s=self.options.lost_after_s,
        )

    def _identity(self) -> Identity:
        return Identity(self.info.name, self.info.id, self.incarnation)

    def _on_admitted(self, sock: socket.socket, core: Server) -> None:
        peer = WorkerInfo(core.peer.name, core.peer.id)
        connection = self._new_connection(peer, core.peer.incarnation)
        if sock.family == socket.AF_UNIX:
            self._share_memory(connection)
        with self._connections_lock:
            self._accepted.add(connection)
        connection.open(lambda self_: self._stream(self_, sock), core.surplus)

    def _on_lost(self, connection: Connection, reason: str, on_purpose: bool) -> None:
        """A connection is gone, and with it the worker at its other end."""
        peer, incarnation = connection.peer, connection.incarnation
        with self._connections_lock:
            self._accepted.discard(connection)
            if self._dialled.get(peer.id) is connection:
                del self._dialled[peer.id]
            others = [
                each
                for each in (*self._dialled.values(), *self._accepted)
                if each.peer.id == peer.id and each.incarnation == incarnation
            ]
        self._membership.forget(peer.name)
        reason = "it left" if on_purpose else reason
        self._fail_calls_of(connection, reason)
        for other in others:
            other.left_on_purpose |= on_purpose
            other.lose(reason)
        if (peer.id, incarnation) not in self._given_up or not incarnation:
            self._given_up.add((peer.id, incarnation))
            if not self._is_closed:
                (log.debug if on_purpose else log.warning)("worker %r is lost: %s", peer.name, reason)
            for callback in self._lost_callbacks:
                callback(peer, incarnation)

    def _fail_calls_of(self, connection: Connection, reason: str) -> None:
        refusal = connection.refusal
        for call in self._calls.take_of(connection):
            call.receiver.fail(refusal or WorkerLostError(connection.peer.name, reason))

    def _close_all(self, done: threading.Event) -> None:
        for listener in self._listeners:
            listener.close()
        for connection in self._connections():
            connection.lose("this worker was shut down")
        for call in self._calls.take_all():
            call.receiver.fail(WorkerLostError(self.info.name, "this worker was shut down"))
        done.set()


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
        if isinstance(box[0], torch.futures.Future):
            box[0].add_done_callback(self._finish_later)
        else:
            agent.finish(self.connection, self.message, box)

    def _run(self) -> object:
        agent, message = self.agent, self.message
        context = message.envelope.context
        if context is None or agent.autograd is None:
            value = agent.decode(message, self.origin, self.references)
            return self.handler(self.origin, self.body, value)
        with agent.autograd.entered(context):
            value = agent.decode(message, self.origin, self.references)
            return self.handler(self.origin, self.body, value)

    def _finish_later(self, future: torch.futures.Future[Any]) -> None:
        try:
            value = future.value()
        except Exception as error:
            self.agent.finish_failed(self.connection, self.message, error)
            return
        self.agent.finish(self.connection, self.message, [value])


def _envelope(
    body: msgspec.Struct | msgspec.Raw,
    raw: msgspec.Raw,
    infos: list[Any],
    context: int | None,
    graph: Any,
    wires: list[Any],
) -> Envelope:
    packed = body if isinstance(body, msgspec.Raw) else msgspec.Raw(encode(body))
    packed_graph = None if graph is None else msgspec.Raw(encode(graph))
    return Envelope(packed, raw, infos, context, packed_graph, [msgspec.Raw(encode(wire)) for wire in wires])


def _drop(what: object) -> None:
    """Let it die on this thread: unmapping takes its time."""


def _too_late(timeout_s: float) -> RpcTimeoutError:
    return RpcTimeoutError(
        f"no answer within the timeout of {timeout_s:g} s",
        "one in time",
        "raise the timeout of this call or of init_rpc, or see the callee",
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
