"""References at run time: the table of the protocol, the values, and what goes between them, users' objects and the agent."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import Any, Protocol

import msgspec

from pibroch.errors import ProtocolError, ReferenceLostError
from pibroch.rpc.calls.agent import Agent
from pibroch.rpc.info import WorkerInfo
from pibroch.rpc.references import (
    ANY_LIFE,
    MAX_BATCH,
    Fork,
    Message,
    News,
    Peer,
    ReferenceTable,
    State,
    ValuePlace,
    Wire,
)
from pibroch.rpc.references.owned import OwnedValue

log = logging.getLogger(__name__)

MAX_FORKS = 1 << 18  # references to values elsewhere that others may send here

_read_wire = msgspec.msgpack.Decoder(Wire).decode


def no_value(what: str) -> ReferenceLostError:
    """The error of a reference whose value is not there any more."""
    return ReferenceLostError(what, "a value at its owner", "make it again")


class Handle(Protocol):
    """An object that users hold (``rref.RRef``), and how the runtime makes one."""

    @classmethod
    def of_owner(
        cls, references: Any, reference: int, owned: OwnedValue, deadline: float | None = None
    ) -> object:
        """One for a value of this worker, counted already."""

    @classmethod
    def of_user(
        cls, references: Any, owner: WorkerInfo, fork: Fork, deadline: float | None = None
    ) -> object:
        """One for a value elsewhere."""

    def owner(self) -> WorkerInfo:
        """The worker that has the value."""

    def place(self) -> ValuePlace:
        """Which value it stands for, in the words of a message."""

    def parts(self, references: Any) -> tuple[Fork | None, int]:
        """Fork (of a user) and number of the value."""


class ReferenceRuntime:
    """This worker's references, but for calls on them.

    The table is used under a lock by any thread. What follows (messages, values to let go) is done
    in batches on the loop, in ``_flush``. The end of a Python object may be noticed anywhere, by
    the garbage collector too: it only puts a note into a queue and wakes the loop.
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
        agent.serve(News, self._on_news, life=lambda news: news.sender)
        agent.when_lost(self._on_lost)
        agent.when_closed(self.close)

    # Python objects

    def own(self, owned: OwnedValue) -> int:
        """A value made here, for one ``RRef`` object; returns its number."""
        reference = next(self.agent.ids)
        with self._lock:
            self.check_open()
            self._table.owners.make(reference)
            self._values[reference] = owned
        return reference

    def create(self, owner: WorkerInfo) -> Fork:
        """A fork of a value that ``owner`` will be asked to make."""
        self._workers[owner.id] = owner
        with self._lock:
            self.check_open()
            return self._table.users.create(
                next(self.agent.ids), next(self.agent.ids), self._peer(owner)
            )

    def created(self, fork: Fork, owner: Peer) -> None:
        """The owner has answered."""
        with self._lock:
            self._table.users.created(fork, owner)
        self._plan()

    def creation_failed(self, fork: Fork, error: Exception, owner_lives: bool) -> None:
        """There will be no value."""
        with self._lock:
            self._table.users.creation_failed(fork, error, owner_lives)
        self._plan()

    def release(self, fork_or_reference: Fork | int) -> None:
        """A Python object is gone.

        Called by the garbage collector: no locks, no input or output.
        """
        if not self.is_closed:
            self._released.append(fork_or_reference)
            self._plan()

    # references in messages

    def send(self, rref: Handle, to: WorkerInfo, incarnation: int = ANY_LIFE) -> Wire:
        """The form in which ``rref`` travels to ``to`` (in this life).

        From now on the value is kept for it.

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
                place = ValuePlace(
                    reference, self.me, self._table.owners.entries[reference].creator, known=True
                )
        return Wire(place, rref.owner().name, self.me, number)

    def unsend(self, wire: Wire) -> None:
        """The message will not be sent after all."""
        with self._lock:
            self._table.unshare(wire)
        self._plan()

    def receive(self, raw: msgspec.Raw, origin: WorkerInfo, incarnation: int) -> object:
        """The handle of a reference that came in a message of this life of ``origin``.

        Raises:
            ProtocolError: when it is none, or not the origin's.
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
        self._remember(origin)
        place = wire.place
        with self._lock:
            self.check_open()
            if len(self._table.users.forks) >= MAX_FORKS:
                raise ProtocolError(
                    f"one more reference than {MAX_FORKS:,}", "fewer", "let some of them go"
                )
            self._table.is_back(wire.sender)
            got = self._table.receive(wire)
            owned = self._value(place.reference) if got is True else OwnedValue()
        self._plan()
        if got is None:
            raise ProtocolError(f"fork {wire.fork} twice", "each fork once")
        if isinstance(got, Fork):
            owner = self._workers.setdefault(
                place.owner.worker, WorkerInfo(wire.owner_name, place.owner.worker)
            )
            return self.handles.of_user(self, owner, got)
        if not got:
            owned.fail(no_value(f"reference {place.reference}, whose value is gone"))
        return self.handles.of_owner(self, place.reference, owned)

    # values here

    def value_at(self, place: ValuePlace, asker: int | None = None) -> OwnedValue:
        """The value that a peer speaks of, which may still be in the making.

        Raises:
            ReferenceLostError: when there is none and none will come.
        """
        with self._lock:
            self.check_open()
            wanted = self._table.owners.wants(place, asker)
            owned = self._value(place.reference) if wanted else None
        self._plan()
        if owned is None:
            raise no_value(f"reference {place.reference} to a value of this worker, which is gone")
        return owned

    def begin(self, reference: int, fork: int, creator: Peer, origin: WorkerInfo) -> OwnedValue:
        """A peer asks for a value: where to put it.

        Raises:
            ReferenceLostError: when the peer is lost already.
            ProtocolError: when the number is taken.
        """
        self._remember(origin)
        if creator == self.me:
            return self._values.get(reference) or OwnedValue()  # maybe nobody wants it any more
        with self._lock:
            self.check_open()
            if self.agent.incarnation_of(origin) == creator.incarnation:
                self._table.is_back(creator)
            try:
                wanted = self._table.owners.created(reference, fork, creator)
            except ValueError as error:
                raise ProtocolError(f"reference {reference} twice", "each once") from error
            owned = self._value(reference) if wanted else None
        if owned is None:
            raise no_value(f"reference {reference}, whose creator is lost")
        return owned

    def live_counts(self) -> dict[str, int]:
        """How many values, forks and so on there are, by kind.

        All zero when nothing is referred to.
        """
        with self._lock:
            return self._table.counts() | {
                "held": len(self._values),
                "released": len(self._released),
            }

    def close(self) -> None:
        """Forget everything; references cannot be used any more."""
        with self._lock:
            self.is_closed = True
            values = self._values
            self._values = {}
            for fork in list(self._table.users.forks.values()):
                fork.failure = RuntimeError(
                    "got a reference after RPC was shut down; need one of the present group"
                )
                self._table.users.gone(fork)
            self._table = ReferenceTable(self.me)
            self._released.clear()
        for owned in values.values():
            owned.fail(RuntimeError("RPC was shut down before the value was made"))

    def check_open(self) -> None:
        """Raise RuntimeError once RPC was shut down."""
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

    def _peer(self, to: WorkerInfo, incarnation: int = ANY_LIFE) -> Peer:
        """The life of a worker that messages go to now.

        Under the lock: the loop drops a lost connection before it tells the table, so the table
        hears of the loss after this.
        """
        if incarnation != ANY_LIFE:
            return Peer(to.id, incarnation)
        peer = Peer(to.id, self.agent.incarnation_of(to))
        self._table.is_back(peer)
        return peer

    def _remember(self, worker: WorkerInfo) -> None:
        self._workers[worker.id] = worker

    def _on_news(self, origin: WorkerInfo, news: News, value: object) -> None:
        self._remember(origin)
        with self._lock:
            if self.is_closed:
                return
            self._table.is_back(Peer(origin.id, news.sender))
            self._table.handle_news(origin.id, news)
            is_more = self._table.has_instructions
        if is_more and not self._is_planned:
            self._flush()  # at once: this is the loop

    def _on_lost(self, worker: WorkerInfo, incarnation: int) -> None:
        self._workers.pop(worker.id, None)
        with self._lock:
            self._table.lost(Peer(worker.id, incarnation))
        self._plan()

    def _plan(self) -> None:
        """Let the loop do what is to be done; without locks."""
        if (
            (self._table.has_instructions or self._released)
            and not self._is_planned
            and not self.is_closed
        ):
            self._is_planned = True
            self.agent.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_planned = False  # before the queue is read: what comes later plans anew
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
            dropped = [
                self._values.pop(each)
                for each in self._table.take_discarded()
                if each in self._values
            ]
            failed = [
                (each, self._values.pop(each))
                for each in self._table.take_failed()
                if each in self._values
            ]
        for peer, batch in messages.items():
            for start in range(0, len(batch), MAX_BATCH):
                self._tell(peer, batch[start : start + MAX_BATCH])
        for reference, owned in failed:
            owned.fail(no_value(f"reference {reference}, whose creator did not come to ask for it"))
        self._let_go(dropped)

    def _tell(self, peer: Peer, batch: list[Message]) -> None:
        worker = self._workers.get(peer.worker)
        if worker is None:
            self.agent.submit(lambda: self._find_and_tell(peer, batch))
        else:
            self.agent.notify(worker, News(self.me.incarnation, peer.incarnation, batch))

    def _find_and_tell(self, peer: Peer, batch: list[Message]) -> None:
        """To a worker that this one only heard of (on the pool: the rendezvous may take its time)."""
        try:
            self._remember(self.agent.find(peer.worker))
        except (ValueError, RuntimeError) as error:
            log.warning("references: worker %d cannot be found: %s", peer.worker, error)
            self._on_lost(WorkerInfo(f"worker-{peer.worker}", peer.worker), peer.incarnation)
            return
        self._tell(peer, batch)

    def _let_go(self, dropped: list[OwnedValue]) -> None:
        """Drop values: those of plain types here, others on the pool, as their end may run code of the user's."""
        others = [owned for owned in dropped if not owned.is_plain()]
        dropped.clear()
        if others:
            self.agent.submit(others.clear)
