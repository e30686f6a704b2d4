"""The reference protocol of one worker, as owner and as user (pure).

Events in, messages and values to discard out. Section 3.3 of the paper: a star around each value's
owner, which counts the forks of all users; the sender of a reference keeps its own fork until the
receiver's is confirmed. Differs from the paper: no message depends on the order of another one, so
a pair of workers may use any number of connections; and forks are counted by the incarnation of the
worker that holds them, so that they can be dropped when it ends.

>>> user, owner = Peer(0, 7), Peer(1, 8)
>>> table = ReferenceTable(user)
>>> fork = table.users.create(reference=100, number=200, owner=owner)  # remote(...)
>>> table.users.share(fork, child=201, to=Peer(2, 9))  # sent on before the owner answered
>>> table.users.release(fork)  # and released here
>>> table.users.created(fork, owner)  # the owner has the value
>>> table.take_messages()  # but the third worker still needs this fork
{}
>>> table.handle(Peer(2, 9), Settled(201))
>>> table.take_messages() == {owner: [Dropped(100, 200)]}
True
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from pibroch.rpc.references.messages import (
    ANY_INCARNATION,
    Confirmed,
    CreationQuery,
    Dropped,
    Message,
    MessageBatch,
    NotComing,
    Peer,
    Refused,
    Register,
    Settled,
    Wire,
)
from pibroch.rpc.references.owner import OwnerSide
from pibroch.rpc.references.user import Fork, UserSide

log = logging.getLogger(__name__)

MAX_LOST_REMEMBERED = 4096


class ReferenceTable:
    """The references of one worker, as an owner (``owners``) and as a user (``users``).

    Attributes:
        me: this worker's incarnation.
        users: forks held here.
        owners: values held here.
    """

    def __init__(self, me: Peer) -> None:
        self.me = me
        self._outbox: dict[Peer, list[Message]] = {}
        self._lost: dict[Peer, None] = {}  # in the order of loss
        self.users = UserSide(me, self._send, self._lost.__contains__)
        self.owners = OwnerSide(me, self._send, self._lost.__contains__)
        self._handlers: dict[type, Callable[[Any, Peer], None]] = {
            Register: self.owners.register,
            Dropped: self.owners.dropped,
            NotComing: self.owners.not_coming,
            Confirmed: self.users.confirmed,
            Refused: self.users.refused,
            Settled: self.users.settled,
            CreationQuery: self.users.queried,
        }

    def handle(self, origin: Peer, message: Message) -> None:
        """Handle one message; one that fits nothing here is late or forged, and changes nothing."""
        self._handlers[type(message)](message, origin)

    def handle_batch(self, origin_worker: int, batch: MessageBatch) -> None:
        """Handle a batch of messages.

        Of a batch for an earlier incarnation of this worker, messages that want an answer get one.
        """
        origin = Peer(origin_worker, batch.sender)
        if batch.receiver in (self.me.incarnation, ANY_INCARNATION):
            for message in batch.messages:
                self.handle(origin, message)
            return
        log.info(
            "%d messages of worker %d are for an earlier incarnation of this worker",
            len(batch.messages),
            origin_worker,
        )
        for message in batch.messages:
            if isinstance(message, Register):
                self._send(origin, Refused(message.fork))
            elif isinstance(message, CreationQuery):
                self._send(origin, NotComing(message.reference))

    def receive(self, wire: Wire) -> Fork | bool | None:
        """Handle a reference that arrived in a message.

        Returns:
            The new fork; for a value of this worker whether it exists, and has one more handle;
            ``None`` for the number of an existing fork, which no honest worker sends.
        """
        place = wire.place
        if place.owner.worker != self.me.worker:
            return self.users.receive(place, wire.fork, wire.sender)
        exists = self.owners.receive(place)
        if wire.sender == self.me:
            self.unshare(wire)
        else:
            self._send(wire.sender, Settled(wire.fork))
        return exists

    def unshare(self, wire: Wire) -> None:
        """Undo the sharing of a reference whose message was not sent, or was one to this worker."""
        self.owners.unshare(wire.place.reference, wire.fork)
        self.users.unshare(wire.fork)

    def lost(self, peer: Peer) -> None:
        """Drop all forks of an incarnation that has ended; its late messages add no new ones.

        With ``ANY_INCARNATION`` as its incarnation: the worker cannot be reached.
        """
        if peer.incarnation != ANY_INCARNATION:
            self._lost[peer] = None
            if len(self._lost) > MAX_LOST_REMEMBERED:
                del self._lost[next(iter(self._lost))]
        self._outbox.pop(peer, None)
        self.users.lost(peer)
        self.owners.lost(peer)

    def is_back(self, peer: Peer) -> None:
        """Count an incarnation again that was taken for lost and has a new connection."""
        self._lost.pop(peer, None)

    @property
    def has_instructions(self) -> bool:
        """Whether there is something to send, discard or fail."""
        return bool(self._outbox or self.owners.discarded or self.owners.failed)

    def take_messages(self) -> dict[Peer, list[Message]]:
        """Messages to be sent, by receiver; the caller sends them."""
        messages = self._outbox
        self._outbox = {}
        return messages

    def take_discarded(self) -> list[int]:
        """Values that nobody refers to any more; the caller drops them."""
        discarded = self.owners.discarded
        self.owners.discarded = []
        return discarded

    def take_failed(self) -> list[int]:
        """Values that were expected and will not be created."""
        failed = self.owners.failed
        self.owners.failed = []
        return failed

    def counts(self) -> dict[str, int]:
        """How many entries of each kind there are."""
        entries = self.owners.entries.values()
        return {
            "values": len(entries),
            "expected": sum(not entry.created for entry in entries),
            "handles": sum(entry.handles for entry in entries),
            "forks_of_others": sum(len(entry.forks) for entry in entries),
            "forks": len(self.users.forks),
            "pending": len(self.users.creations),
            "children": len(self.users.parents),
        }

    def _send(self, peer: Peer, message: Message) -> None:
        if peer not in self._lost:
            self._outbox.setdefault(peer, []).append(message)
