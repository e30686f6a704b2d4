"""The owner's side of the reference protocol: its values, and who holds forks of them (pure)."""

from __future__ import annotations

from dataclasses import dataclass, field

from pibroch.rpc.references.messages import (
    ANY_INCARNATION,
    Confirmed,
    CreationQuery,
    Dropped,
    NotComing,
    Peer,
    Refused,
    Register,
    ValuePlace,
)
from pibroch.rpc.references.user import IsLost, Send

MAX_EXPECTED = 1 << 16  # values that others refer to and that are not created yet
MAX_FORKS = 1 << 18  # of one value


@dataclass(slots=True, eq=False)
class Entry:
    """One value of this worker.

    Attributes:
        creator: who requested it, or will.
        created: whether its creator's request has arrived; others may refer to it before that.
        handles: the number of references to it on this worker itself.
        forks: forks of other workers, and who holds each.
    """

    creator: Peer
    created: bool
    handles: int = 0
    forks: dict[int, Peer] = field(default_factory=dict)


class OwnerSide:
    """The owner's half of ``ReferenceTable``.

    A value lives while it has handles or forks. A value that others refer to before it is created
    may be *expected*: its creator's request was slower than their messages. Then the creator gets a
    ``CreationQuery``. Its request arrives, or it answers no, or is lost; so nothing is expected for
    ever.
    """

    def __init__(self, me: Peer, send: Send, is_lost: IsLost) -> None:
        self._me = me
        self._send = send
        self._is_lost = is_lost
        self.entries: dict[int, Entry] = {}
        self._num_expected = 0
        self.discarded: list[int] = []  # values that nobody refers to any more
        self.failed: list[int] = []  # values that were expected and will not be created

    def make(self, reference: int) -> None:
        """Add a value made on this worker, with one handle."""
        self.entries[reference] = Entry(self._me, created=True, handles=1)

    def created(self, reference: int, number: int, creator: Peer) -> bool:
        """Handle the request of ``creator`` for a value, of which it holds fork ``number``.

        Returns:
            ``False`` when the creator is lost and nobody needs the value.

        Raises:
            ValueError: when there is a value of this number already.
        """
        if self._is_lost(creator):
            return False
        entry = self.entries.get(reference)
        if entry is None:
            entry = self.entries[reference] = Entry(creator, created=True)
        elif entry.created or entry.creator != creator or number in entry.forks:
            raise ValueError(f"reference {reference} exists already")
        self._num_expected -= not entry.created
        entry.created = True
        entry.forks[number] = creator
        return True

    def expects(self, place: ValuePlace, asker: int | None = None) -> bool:
        """Handle a mention of a value by another worker; returns whether it is created or expected.

        ``asker`` is the other worker's id, if it certainly has not sent ``Dropped`` yet: a creator
        that mentions its own value needs no ``CreationQuery``.
        """
        if not place.owner.matches(self._me):
            return False
        if place.reference in self.entries:
            return True
        if (
            place.seen_by_owner
            or place.creator == self._me
            or self._is_lost(place.creator)
            or self._num_expected >= MAX_EXPECTED
        ):
            return False
        self._num_expected += 1
        self.entries[place.reference] = Entry(place.creator, created=False)
        if asker != place.creator.worker:
            self._send(place.creator, CreationQuery(place.reference))
        return True

    def register(self, message: Register, holder: Peer) -> None:
        """Count a fork that a user holds, or refuse it."""
        if self._is_lost(holder):
            return
        if not self.expects(message.place):
            self._send(holder, Refused(message.fork))
            return
        forks = self.entries[message.place.reference].forks
        if len(forks) >= MAX_FORKS:
            self._send(holder, Refused(message.fork))
            return
        if forks.setdefault(message.fork, holder) == holder:
            self._send(holder, Confirmed(message.place.reference, message.fork))

    def share(self, reference: int, number: int, to: Peer) -> None:
        """Count at once a fork of an own value that was put into a message."""
        if not self._is_lost(to):
            self.entries[reference].forks[number] = to

    def unshare(self, reference: int, number: int) -> None:
        """Remove a fork, if there is one of this number."""
        entry = self.entries.get(reference)
        if entry is not None and entry.forks.pop(number, None) is not None:
            self._discard_if_unused(reference, entry)

    def receive(self, place: ValuePlace) -> bool:
        """Add a handle for an own value that arrived in a message, if it is created or expected."""
        if not self.expects(place):
            return False
        self.entries[place.reference].handles += 1
        return True

    def release(self, reference: int) -> None:
        """Remove a handle."""
        entry = self.entries.get(reference)
        if entry is not None and entry.handles > 0:
            entry.handles -= 1
            self._discard_if_unused(reference, entry)

    def dropped(self, message: Dropped, by: Peer) -> None:
        """Remove a fork that a user no longer needs."""
        entry = self.entries.get(message.reference)
        holder = None if entry is None else entry.forks.get(message.fork)
        if holder is not None and holder.matches(by):
            self.unshare(message.reference, message.fork)

    def not_coming(self, message: NotComing, by: Peer) -> None:
        """Fail an expected value, as no request of its creator is under way."""
        entry = self.entries.get(message.reference)
        if entry is not None and not entry.created and entry.creator.worker == by.worker:
            self._fail(message.reference, entry)

    def lost(self, peer: Peer) -> None:
        """Remove the forks of a lost incarnation, and fail values that it was to request."""
        for reference, entry in list(self.entries.items()):
            ended = [number for number, holder in entry.forks.items() if holder.ends_with(peer)]
            for number in ended:
                del entry.forks[number]
            if not entry.created and peer in (
                entry.creator,
                (entry.creator.worker, ANY_INCARNATION),
            ):
                self._fail(reference, entry)
            elif not entry.created and entry.creator.worker == peer.worker:
                # the first query may be lost with that incarnation
                self._send(entry.creator, CreationQuery(reference))
            elif ended:
                self._discard_if_unused(reference, entry)

    def _discard_if_unused(self, reference: int, entry: Entry) -> None:
        if entry.created and not entry.forks and not entry.handles:
            del self.entries[reference]
            self.discarded.append(reference)

    def _fail(self, reference: int, entry: Entry) -> None:
        del self.entries[reference]
        self._num_expected -= 1
        self.failed.append(reference)
        for number, holder in entry.forks.items():
            self._send(holder, Refused(number))
