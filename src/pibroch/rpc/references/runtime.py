"""References at run time: the protocol's table, the values, users' objects, and the agent."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import Any, Protocol

import msgspec

from pibroch.errors import ProtocolError, ReferenceLostError
from pibroch.rpc.calls.agent import Agent
from pibroch.rpc.info import WorkerInfo
from pibroch.rpc.references.messages import (
    ANY_INCARNATION,
    MAX_BATCH,
    Message,
    MessageBatch,
    Peer,
    ValuePlace,
    Wire,
)
from pibroch.rpc.references.owned import OwnedValue
from pibroch.rpc.references.table import ReferenceTable
from pibroch.rpc.references.user import Fork, State

log = logging.getLogger(__name__)

MAX_FORKS = 1 << 18  # references to values elsewhere that others may send here

_read_wire = msgspec.msgpack.Decoder(Wire).decode


def no_value(what: str) -> ReferenceLostError:
    """The error of a reference whose value no longer exists."""
    return ReferenceLostError(what, "a value at its owner", "make it again")


class Handle(Protocol):
    """An object that users hold (``rref.RRef``), and how the runtime makes one."""

    @classmethod
    def of(
        cls,
        references: Any,
        owner: WorkerInfo,
        reference: int,
        held: OwnedValue | Fork,
        deadline: float | None = None,
    ) -> object:
        """A handle of a value of this worker, which the table counts already, or of a fork."""

    def owner(self) -> WorkerInfo:
        """The worker that holds the value."""

    def place(self) -> ValuePlace:
        """The value that it refers to, for a message."""

    def parts(self, references: Any) -> tuple[Fork | None, int]:
        """The fork (``None`` at the owner) and the number of the value."""


class ReferenceRuntime:
    """This worker's references, without the calls on them.

    Any thread uses the table under a lock. The consequences (messages to send, values to drop) are
    handled in batches on the loop, in ``_flush``. Users' objects may die on any thread, also inside
    the garbage collector: then ``release`` only appends to a queue and wakes the loop.
    """

    def __init__(self, agent: Agent, handles: type[Handle]) -> None:
        self.agent = agent
        self.handles = handles
        self.me = Peer(agent.info.id, agent.incarnation)
        self.is_closed = False
        self._table = ReferenceTable(self.me)
        self._lock = threading.Lock()
        self._values: dict[int, OwnedValue] = {}
        self._workers: dict[int, WorkerInfo] = {}
        self._released: deque[Fork | int] = deque()
        self._is_planned = False
        agent.serve(MessageBatch, self._on_batch, incarnation=lambda batch: batch.sender)
        agent.when_lost(self._on_lost)
        agent.when_closed(self.close)

    # Python objects

    def own(self, owned: OwnedValue) -> int:
        """Add a value of this worker for one ``RRef`` object; returns its number."""
        reference = next(self.agent.ids)
        with self._lock:
            self.check_open()
            self._table.owners.make(reference)
            self._values[reference] = owned
        return reference

    def create(self, owner: WorkerInfo) -> Fork:
        """Add a fork of a value that ``owner`` will be requested to create."""
        self._workers[owner.id] = owner
        with self._lock:
            self.check_open()
            return self._table.users.create(
                next(self.agent.ids), next(self.agent.ids), self._peer(owner)
            )

    def created(self, fork: Fork, owner: Peer) -> None:
        """Record that the owner has created the value."""
        with self._lock:
            self._table.users.created(fork, owner)
        self._plan()

    def creation_failed(self, fork: Fork, error: Exception, owner_lives: bool) -> None:
        """Record that the owner has not created the value."""
        with self._lock:
            self._table.users.creation_failed(fork, error, owner_lives)
        self._plan()

    def release(self, fork_or_reference: Fork | int) -> None:
        """Release the fork or handle of an object that died.

        Called inside the garbage collector, so it takes no lock and does no input or output.
        """
        if not self.is_closed:
            self._released.append(fork_or_reference)
            self._plan()

    # references in messages

    def send(self, rref: Handle, to: WorkerInfo, incarnation: int = ANY_INCARNATION) -> Wire:
        """The form in which ``rref`` travels to ``to``; from now on the value is kept for it.

        Raises:
            ReferenceLostError: when the value is gone.
            RuntimeError: when RPC was shut down since the reference was made.
        """
        fork, reference = rref.parts(self)
        number = next(self.agent.ids)
        with self._lock:
            self.check_open()
            peer = self._peer(to, incarnation)
            if fork is not None:
                if fork.state is State.GONE:
                    raise no_value(f"{rref!r}, whose value is gone")
                self._table.users.share(fork, number, peer)
                place = fork.place
            else:
                if reference not in self._table.owners.entries:
                    raise no_value(f"{rref!r}, whose value is gone")
                self._table.owners.share(reference, number, peer)
                creator = self._table.owners.entries[reference].creator
                place = ValuePlace(reference, self.me, creator, seen_by_owner=True)
        return Wire(place, rref.owner().name, self.me, number)

    def unsend(self, wire: Wire) -> None:
        """Undo ``send``, as the message was not sent."""
        with self._lock:
            self._table.unshare(wire)
        self._plan()

    def receive(self, raw: msgspec.Raw, origin: WorkerInfo, incarnation: int) -> object:
        """The handle of a reference that arrived in a message of ``origin``.

        Raises:
            ProtocolError: when it cannot be read, or is not the origin's.
        """
        try:
            wire = _read_wire(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(
                f"a reference that cannot be read ({error})", "one as in the wire format"
            ) from error
        if wire.sender != (origin.id, incarnation):
            raise ProtocolError(
                f"a reference of {wire.sender} from worker {origin.id}",
                "its own, of its present life",
            )
        self._workers[origin.id] = origin
        place = wire.place
        with self._lock:
            self.check_open()
            if len(self._table.users.forks) >= MAX_FORKS:
                raise ProtocolError(
                    f"one more reference than {MAX_FORKS:,}", "fewer", "let some of them go"
                )
            self._table.is_back(wire.sender)
            fork_or_exists = self._table.receive(wire)
            owned = self._value(place.reference) if fork_or_exists is True else OwnedValue()
        self._plan()
        if fork_or_exists is None:
            raise ProtocolError(f"fork {wire.fork} twice", "each fork once")
        if isinstance(fork_or_exists, Fork):
            owner = self._workers.setdefault(
                place.owner.worker, WorkerInfo(wire.owner_name, place.owner.worker)
            )
            return self.handles.of(self, owner, place.reference, fork_or_exists)
        if not fork_or_exists:
            owned.fail(no_value(f"reference {place.reference}, whose value is gone"))
        return self.handles.of(self, self.agent.info, place.reference, owned)

    # values here

    def value_at(self, place: ValuePlace, asker: int | None = None) -> OwnedValue:
        """The value that a peer refers to, which may not be set yet.

        Raises:
            ReferenceLostError: when there is none and none will be created.
        """
        with self._lock:
            self.check_open()
            is_expected = self._table.owners.expects(place, asker)
            owned = self._value(place.reference) if is_expected else None
        self._plan()
        if owned is None:
            raise no_value(f"reference {place.reference} to a value of this worker, which is gone")
        return owned

    def begin(self, reference: int, fork: int, creator: Peer, origin: WorkerInfo) -> OwnedValue:
        """Begin to create a value that a peer requests; returns where to put it.

        Raises:
            ReferenceLostError: when the peer is lost already.
            ProtocolError: when the number is taken.
        """
        self._workers[origin.id] = origin
        if creator == self.me:
            return self._values.get(reference) or OwnedValue()  # it may have been released already
        with self._lock:
            self.check_open()
            if self.agent.incarnation_of(origin) == creator.incarnation:
                self._table.is_back(creator)
            try:
                is_needed = self._table.owners.created(reference, fork, creator)
            except ValueError as error:
                raise ProtocolError(f"reference {reference} twice", "each once") from error
            owned = self._value(reference) if is_needed else None
        if owned is None:
            raise no_value(f"reference {reference}, whose creator is lost")
        return owned

    def live_counts(self) -> dict[str, int]:
        """How many values, forks and so on there are, by kind; all 0 without references."""
        with self._lock:
            return self._table.counts() | {
                "held": len(self._values),
                "released": len(self._released),
            }

    def close(self) -> None:
        """Drop all values; references cannot be used any more."""
        with self._lock:
            self.is_closed = True
            values = self._values
            self._values = {}
            self._table = ReferenceTable(self.me)
            self._released.clear()
        for owned in values.values():
            owned.fail(RuntimeError("RPC was shut down before the value was made"))

    def check_open(self) -> None:
        """Raise ``RuntimeError`` once RPC was shut down."""
        if self.is_closed:
            raise RuntimeError(
                "got a reference after RPC was shut down; need one of the present group"
            )

    # inside

    def _value(self, reference: int) -> OwnedValue:
        owned = self._values.get(reference)
        if owned is None:
            owned = self._values[reference] = OwnedValue()
        return owned

    def _peer(self, to: WorkerInfo, incarnation: int = ANY_INCARNATION) -> Peer:
        """The incarnation of a worker that messages go to now.

        Under the lock: the loop drops a lost connection before it calls ``_on_lost``, so the table
        handles the loss after this.
        """
        if incarnation != ANY_INCARNATION:
            return Peer(to.id, incarnation)
        peer = Peer(to.id, self.agent.incarnation_of(to))
        self._table.is_back(peer)
        return peer

    def _on_batch(self, origin: WorkerInfo, batch: MessageBatch, value: object) -> None:
        self._workers[origin.id] = origin
        with self._lock:
            if self.is_closed:
                return
            self._table.is_back(Peer(origin.id, batch.sender))
            self._table.handle_batch(origin.id, batch)
            is_more = self._table.has_instructions
        if is_more and not self._is_planned:
            self._flush()  # at once, as this runs on the loop

    def _on_lost(self, worker: WorkerInfo, incarnation: int) -> None:
        self._workers.pop(worker.id, None)
        with self._lock:
            self._table.lost(Peer(worker.id, incarnation))
        self._plan()

    def _plan(self) -> None:
        """Have the loop run ``_flush`` if there is something to do; takes no lock."""
        if (
            (self._table.has_instructions or self._released)
            and not self._is_planned
            and not self.is_closed
        ):
            self._is_planned = True
            self.agent.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_planned = False  # before the queue is read, so that later events plan anew
        with self._lock:
            if self.is_closed:
                return
            while self._released:
                item = self._released.popleft()
                if isinstance(item, Fork):
                    self._table.users.release(item)
                else:
                    self._table.owners.release(item)
            messages = self._table.take_messages()
            dropped = [owned for _, owned in self._taken(self._table.take_discarded())]
            failed = self._taken(self._table.take_failed())
        for peer, batch in messages.items():
            for start in range(0, len(batch), MAX_BATCH):
                self._send_batch(peer, batch[start : start + MAX_BATCH])
        for reference, owned in failed:
            owned.fail(no_value(f"reference {reference}, whose creator did not come to ask for it"))
        self._drop_values(dropped)

    def _taken(self, references: list[int]) -> list[tuple[int, OwnedValue]]:
        return [(each, self._values.pop(each)) for each in references if each in self._values]

    def _send_batch(self, peer: Peer, batch: list[Message]) -> None:
        worker = self._workers.get(peer.worker)
        if worker is None:
            self.agent.submit(lambda: self._find_and_send(peer, batch))
        else:
            self.agent.notify(worker, MessageBatch(self.me.incarnation, peer.incarnation, batch))

    def _find_and_send(self, peer: Peer, batch: list[Message]) -> None:
        """Look a worker up and send to it; on the pool, as the rendezvous may block."""
        try:
            self._workers[peer.worker] = self.agent.find(peer.worker)
        except (ValueError, RuntimeError) as error:
            log.warning("references: worker %d cannot be found: %s", peer.worker, error)
            self._on_lost(WorkerInfo(f"worker-{peer.worker}", peer.worker), peer.incarnation)
            return
        self._send_batch(peer, batch)

    def _drop_values(self, dropped: list[OwnedValue]) -> None:
        """Drop values of plain types here, others on the pool, as their end may run users' code."""
        others = [owned for owned in dropped if not owned.is_plain()]
        dropped.clear()
        if others:
            self.agent.submit(others.clear)
