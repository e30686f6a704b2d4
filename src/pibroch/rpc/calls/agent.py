"""The agent of a process: it sends requests to other workers and serves theirs.

Threads: the loop (``reactor``) handles sockets, frames and timers; the pool runs users' functions;
requests are sent by whichever thread makes them. A caller on the same host may read its own answer.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
from collections.abc import Callable
from typing import Any, SupportsIndex

import msgspec
import torch

from pibroch.errors import UnknownWorkerError
from pibroch.rpc.calls.futures import Future, Waiter
from pibroch.rpc.calls.packing import Packer
from pibroch.rpc.calls.pending import Receiver
from pibroch.rpc.calls.pool import Pool
from pibroch.rpc.calls.requests import Requests
from pibroch.rpc.calls.service import RequestService
from pibroch.rpc.info import WorkerInfo, new_ids
from pibroch.rpc.options import UNSET_RPC_TIMEOUT, RpcBackendOptions
from pibroch.rpc.transport.connection import Connection, Message
from pibroch.rpc.transport.frames import Kind
from pibroch.rpc.transport.loopback import Loopback
from pibroch.rpc.transport.membership import Membership, Rendezvous
from pibroch.rpc.transport.peers import Peers
from pibroch.rpc.values.callables import Callables
from pibroch.rpc.values.codec import Codec
from pibroch.rpc.values.messages import encode
from pibroch.wire.reactor import Reactor

log = logging.getLogger(__name__)

_END_S = 2.0  # threads of the pool have this long to finish


class Agent:
    """All messages of this process to and from other workers; README.md has the rules."""

    def __init__(
        self,
        name: str,
        rendezvous: Rendezvous,
        options: RpcBackendOptions,
        callables: Callables,
        secret: bytes,
        reference_type: type | None = None,
    ) -> None:
        self.options = options
        self.callables = callables
        self.ids = new_ids()
        # set by ``api.py``, which composes a worker
        self.wait_to_leave: Callable[[float], None] = lambda timeout_s: None
        self.reactor = Reactor(f"rpc-{name}")
        self.pool = Pool(f"rpc-{name}-worker", options.num_worker_threads, self.reactor)
        self.packer = Packer(
            Codec(callables, options.allow_pickle, reference_type), options.device_maps
        )
        self._closed_callbacks: list[Callable[[], None]] = []
        self._is_closed = False
        self._membership = Membership(rendezvous)
        self.info = WorkerInfo(
            name, rendezvous.rank if rendezvous.rank >= 0 else self._membership.new_id()
        )
        self._requests = Requests(self.info, self.reactor, callables)
        self._service = RequestService(self.packer, self.reactor, self.pool, options.limits)
        # with ``on_message`` these make the agent an ``Inbox``
        self.on_failure = self._requests.on_failure
        self.on_lost = self._requests.lose
        host = options.bind or rendezvous.bind_host()
        self._peers = Peers(
            self.info,
            options,
            secret,
            self.reactor,
            self.pool.submit,
            self._membership,
            (host, 0),
            self,
        )
        self.incarnation = self._peers.incarnation
        self.record = self._peers.record
        # what one of its parts does for all
        self.serve = self._service.serve
        self.when_lost = self._peers.when_lost
        self.incarnation_of = self._peers.incarnation_of
        self.reach = self._peers.connection_to
        self.workers = self._membership.workers
        self.submit = self.pool.submit
        self._loopback = Loopback(self.info, self.incarnation, options.limits, self, self.reactor)

    # life

    def start(self) -> None:
        """Listen, and join the others.

        Raises:
            RpcTimeoutError: when not all workers join in time.
            ConfigError: when the name is taken.
        """
        _settle_torch()
        self.reactor.start()
        try:
            self._membership.join(self.record)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Send a goodbye to all and stop; calls that still wait fail."""
        if self._is_closed:
            return
        self._is_closed = True
        for callback in self._closed_callbacks:
            callback()
        with contextlib.suppress(RuntimeError):  # the host of the store may be gone already
            # before the goodbye, after which others look this worker up again
            self._membership.leave(self.record)
        self._peers.close()
        self._requests.lose_all("this worker was shut down")
        self.reactor.stop()
        self.pool.close(_END_S)

    def when_closed(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` when this agent is closed, before its connections are."""
        self._closed_callbacks.append(callback)

    # other workers

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
        find = self._membership.find
        find_id = self._membership.find_id
        record = find_id(operator.index(to)) if isinstance(to, SupportsIndex) else find(to)
        if record is None:
            names = ", ".join(info.name for info in self.workers())
            raise UnknownWorkerError(
                f"worker {to!r}, could not find destination",
                f"one that has joined ({names})",
                "see its init_rpc",
            )
        return record.info

    # sending

    def request(
        self,
        to: WorkerInfo,
        body: msgspec.Struct,
        value: object = None,
        *,
        timeout: float = UNSET_RPC_TIMEOUT,
        in_context: bool = False,
    ) -> Future:
        """Send a request; the future is done when ``to`` has answered, failed, or is lost or late.

        Does not block.
        """
        future = self.future()
        self.ask(future, to, body, value, self.timeout_s(timeout), in_context=in_context)
        return future

    def request_sync(
        self,
        to: WorkerInfo,
        body: msgspec.Struct,
        value: object = None,
        *,
        timeout: float = UNSET_RPC_TIMEOUT,
        in_context: bool = False,
    ) -> Any:
        """Send a request to ``to`` and wait for the answer."""
        waiter = Waiter()
        timeout_s = self.timeout_s(timeout)
        connection = self.ask(waiter, to, body, value, timeout_s, in_context=in_context)
        return waiter.wait(self.pool, timeout_s, connection.only_stream)

    def notify(self, to: WorkerInfo, body: msgspec.Struct, value: object = None) -> None:
        """Send a note, which has no answer; does not block.

        When the worker is lost, so is the note.
        """
        if not self._is_closed:
            connection = self._connection_to(to)
            packed = self.packer.pack(connection, msgspec.Raw(encode(body)), value, None)
            self.packer.send(connection, Kind.NOTE, 0, packed)

    def call_soon(self, function: Callable[[], None]) -> None:
        """Run ``function`` on the loop; takes no lock, so the garbage collector may call it."""
        if not self._is_closed:
            self.reactor.call_soon(function)

    def timeout_s(self, timeout: float) -> float:
        """The timeout in force, in seconds, 0 for none."""
        return self.options.rpc_timeout if timeout == UNSET_RPC_TIMEOUT else max(0.0, timeout)

    def future(self) -> Future:
        """A new future, for use as the receiver of an answer."""
        return Future(self.pool, self.reactor)

    def ask(
        self,
        receiver: Receiver,
        to: WorkerInfo,
        body: msgspec.Struct,
        value: object,
        timeout_s: float,
        *,
        in_context: bool = False,
    ) -> Connection:
        """Send a request, whose outcome ``receiver`` gets; ``timeout_s`` of 0 means none.

        With ``in_context`` it belongs to the distributed autograd context of the calling thread.
        Returns the connection on which it was sent.
        """
        if self._is_closed:
            raise RuntimeError("RPC was shut down")
        connection = self._connection_to(to)
        recorder = self.packer.recorder
        context = recorder.current_context() if in_context and recorder is not None else None
        packed = self.packer.pack(connection, msgspec.Raw(encode(body)), value, context)
        number = self._requests.expect(connection, receiver, timeout_s)
        self.packer.send(connection, Kind.REQUEST, number, packed)
        return connection

    def _connection_to(self, worker: WorkerInfo) -> Connection:
        return self._loopback if worker.id == self.info.id else self._peers.connection_to(worker)

    # serving

    @property
    def num_started(self) -> int:
        """The number of requests since this worker joined."""
        return self._requests.num_started

    def is_busy(self, but: int = 0) -> bool:
        """Whether it waits for an answer, or handles more than ``but`` messages of others."""
        return self._requests.num_pending > 0 or self._service.num_running > but

    def on_message(self, connection: Connection, message: Message) -> None:
        """Handle a message: an answer, a request or a note (``connection.Inbox``)."""
        if message.kind == Kind.ANSWER:
            self._on_answer(connection, message)
        elif not self._is_closed:  # the caller will see that this worker has left
            self._service.on_message(connection, message)

    def _on_answer(self, connection: Connection, message: Message) -> None:
        call = self._requests.taken(connection, message.number)
        origin = connection.peer
        try:
            self.packer.receive_references(connection, message)
            if call is None:
                log.debug("an answer that arrived too late")
                return
            value = self.packer.unpack(message, origin)
        except Exception as error:
            if call is not None:
                call.receiver.fail(error)
            return
        call.receiver.succeed(value)


def _settle_torch() -> None:
    """Have torch rebuild its autograd engine and its thread pool now, in a forked process.

    Torch does so at the first operation that saves a tensor, and at a thread's first large one,
    without a lock: two threads of the pool at once would crash the former, and find none of the
    latter ("Invalid thread pool!").
    """
    with torch.inference_mode(False):  # and with gradients, whatever mode the caller is in
        torch.ones(1, requires_grad=True).square()
    torch.set_num_threads(torch.get_num_threads())


_current: Agent | None = None


def current_agent() -> Agent:
    """This process's agent.

    Raises:
        RuntimeError: when RPC is not initialised.
    """
    if _current is None:
        raise RuntimeError(
            "RPC has not been initialized. Call init_rpc before using RPC functions."
        )
    return _current


def is_initialized() -> bool:
    """Whether this process is a worker."""
    return _current is not None


def set_current_agent(agent: Agent | None) -> None:
    """Make ``agent`` the agent of this process, ``None`` for none."""
    global _current
    _current = agent


os.register_at_fork(after_in_child=lambda: set_current_agent(None))
