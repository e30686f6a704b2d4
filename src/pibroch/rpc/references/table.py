"""The reference protocol of one worker, owner and user in one.

Events in, messages and values to discard out (pure).

Section 3.3 of the paper: a star around each value's owner, which counts the forks of all users;
whoever sends a reference keeps its own fork until the receiver's is confirmed. Differs from the
paper: no message depends on the order of another one, so a pair of workers may talk over any number
of connections; and forks are counted by the life of the worker that holds them, so that they can be
dropped when it ends.

>>> user, owner = Peer(0, 7), Peer(1, 8)
>>> table = ReferenceTable(user)
>>> fork = table.users.create(reference=100, number=200, owner=owner)  # remote(...)
>>> table.users.share(fork, child=201, to=Peer(2, 9))                  # sent to a third worker, before the owner answered
>>> table.users.release(fork)                                          # and forgotten here
>>> table.users.created(fork, owner)                                   # the owner has the value
>>> table.take_messages()                                              # but the third worker still needs our fork
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
    ANY_LIFE,
    Asked,
    Confirmed,
    Dropped,
    Message,
    News,
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
    """All that one worker knows of references, as an owner (``owners``) and as a user (``users``).

    Attributes:
        me: this worker's life.
        users: forks held here.
        owners: values held here.
    """

    def __init__(self, me: Peer) -> None:
        self.me = me
        self._outbox: dict[Peer, list[Message]] = {}
        self._lost: dict[Peer, None] = {}  # in the order of loss
        self.users = UserSide(me, self._tell, self._lost.__contains__)
        self.owners = OwnerSide(me, self._tell, self._lost.__contains__)
        users = self.users
        owners = self.owners
        self._handlers: dict[type, Callable[[Peer, Any], None]] = {
            Register: lambda origin, message: owners.register(message, origin),
            Dropped: lambda origin, message: owners.dropped(
                message.reference, message.fork, origin
            ),
            NotComing: lambda origin, message: owners.not_coming(message.reference, origin),
            Confirmed: lambda origin, message: users.confirmed(
                message.reference, message.fork, origin
            ),
            Refused: lambda origin, message: users.refused(message.fork, origin),
            Settled: lambda origin, message: users.settled(message.fork, origin),
            Asked: lambda origin, message: users.asked(message.reference, origin),
        }

    def handle(self, origin: Peer, message: Message) -> None:
        """A message came.

        Those that fit nothing here change nothing: they are late, or not honest.
        """
        self._handlers[type(message)](origin, message)

    def handle_news(self, origin_worker: int, news: News) -> None:
        """A batch came; if it was meant for an earlier life of this worker, those who wait for an answer get one."""
        origin = Peer(origin_worker, news.sender)
        if news.receiver in (self.me.incarnation, ANY_LIFE):
            for message in news.messages:
                self.handle(origin, message)
            return
        log.info(
            "%d messages of worker %d are for an earlier life of this worker",
            len(news.messages),
            origin_worker,
        )
        for message in news.messages:
            if isinstance(message, Register):
                self._tell(origin, Refused(message.fork))
            elif isinstance(message, Asked):
                self._tell(origin, NotComing(message.reference))

    def receive(self, wire: Wire) -> Fork | bool | None:
        """A reference came in a message: our fork.

        When the value is our own: whether it is there; then we have a handle more. ``None`` for a
        fork that is here already: the message is not honest.
        """
        place = wire.place
        if place.owner.worker != self.me.worker:
            return self.users.receive(place, wire.fork, wire.sender)
        found = self.owners.receive(place)
        if wire.sender == self.me:
            self.unshare(wire)
        else:
            self._tell(wire.sender, Settled(wire.fork))
        return found

    def unshare(self, wire: Wire) -> None:
        """A message with this reference of ours will not be sent after all, or has reached ourselves."""
        self.owners.unshare(wire.place.reference, wire.fork)
        self.users.unshare(wire.fork)

    def lost(self, peer: Peer) -> None:
        """A life of another worker has ended.

        Its forks are dropped, and what it still says must not bring any back.

        With ``ANY_LIFE`` as its incarnation: the worker cannot be reached.
        """
        if peer.incarnation != ANY_LIFE:
            self._lost[peer] = None
            if len(self._lost) > MAX_LOST_REMEMBERED:
                del self._lost[next(iter(self._lost))]
        self._outbox.pop(peer, None)
        self.users.lost(peer)
        self.owners.lost(peer)

    def is_back(self, peer: Peer) -> None:
        """There is a new connection with a life that was taken for lost.

        From now on it counts again.
        """
        self._lost.pop(peer, None)

    def is_lost(self, peer: Peer) -> bool:
        """Whether this life is known to have ended."""
        return peer in self._lost

    @property
    def has_instructions(self) -> bool:
        """Whether there is something to send, discard or fail."""
        return bool(self._outbox or self.owners.discarded or self.owners.failed)

    def take_messages(self) -> dict[Peer, list[Message]]:
        """What is to be sent, by receiver."""
        messages = self._outbox
        self._outbox = {}
        return messages

    def take_discarded(self) -> list[int]:
        """Values that nobody refers to any more."""
        discarded = self.owners.discarded
        self.owners.discarded = []
        return discarded

    def take_failed(self) -> list[int]:
        """Values that were expected and will not come."""
        failed = self.owners.failed
        self.owners.failed = []
        return failed

    def counts(self) -> dict[str, int]:
        """How many entries of each kind there are."""
        entries = self.owners.entries.values()
        return {
            "values": len(entries),
            "expected": sum(not entry.made for entry in entries),
            "handles": sum(entry.handles for entry in entries),
            "forks_of_others": sum(len(entry.forks) for entry in entries),
            "forks": len(self.users.forks),
            "pending": len(self.users.creations),
            "children": self.users.num_children,
        }

    def _tell(self, peer: Peer, message: Message) -> None:
        if peer not in self._lost:
            self._outbox.setdefault(peer, []).append(message)
