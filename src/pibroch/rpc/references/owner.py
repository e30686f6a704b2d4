"""What an owner keeps: which values it has, who holds forks of them, and which ones others speak of too early (pure)."""

from __future__ import annotations

from dataclasses import dataclass, field

from pibroch.rpc.references.messages import (
    ANY_LIFE,
    Asked,
    Confirmed,
    Peer,
    Refused,
    Register,
    ValuePlace,
)
from pibroch.rpc.references.user import IsLost, Tell

MAX_EXPECTED = 1 << 16  # values that others speak of and that are not there
MAX_FORKS = 1 << 18  # of one value


@dataclass(slots=True, eq=False)
class Entry:
    """One value of this worker.

    Attributes:
        creator: who asked, or asks, for it.
        made: it has been asked for; before, others may speak of it, but its creator's request is
            still under way.
        handles: references to it on this worker itself.
        forks: those of other workers, and who holds each.
    """

    creator: Peer
    made: bool
    handles: int = 0
    forks: dict[int, Peer] = field(default_factory=dict)


class OwnerSide:
    """The owner's half of ``ReferenceTable``.

    A value lives while it has handles or forks. A value that somebody speaks of and that is not
    there may be *expected*: its creator's request was slower than the news of it. Then the creator
    is asked whether it will come. It comes, or the creator says no, or is lost; so nothing is
    expected for ever.
    """

    def __init__(self, me: Peer, tell: Tell, is_lost: IsLost) -> None:
        self._me = me
        self._tell = tell
        self._is_lost = is_lost
        self.entries: dict[int, Entry] = {}
        self._num_expected = 0
        self.discarded: list[int] = []  # values that nobody holds any more
        self.failed: list[int] = []  # values that were expected and will not come

    def make(self, reference: int) -> None:
        """A value made here, with one handle."""
        self.entries[reference] = Entry(self._me, made=True, handles=1)

    def created(self, reference: int, number: int, creator: Peer) -> bool:
        """``creator`` asks for a value and holds a fork of it.

        ``False`` when it is lost and nobody is to get the value.

        Raises:
            ValueError: when there is one of this number already.
        """
        if self._is_lost(creator):
            return False
        entry = self.entries.get(reference)
        if entry is None:
            entry = self.entries[reference] = Entry(creator, made=True)
        elif entry.made or entry.creator != creator or number in entry.forks:
            raise ValueError(f"reference {reference} exists already")
        self._num_expected -= not entry.made
        entry.made = True
        entry.forks[number] = creator
        return True

    def wants(self, place: ValuePlace, asker: int | None = None) -> bool:
        """Somebody speaks of this value: whether it is there or expected.

        ``asker`` is the worker that speaks, where it is sure that it has not said ``Dropped`` yet:
        a creator that speaks of what it asked for need not be asked.
        """
        if not place.owner.matches(self._me):
            return False
        if place.reference in self.entries:
            return True
        if (
            place.known
            or place.creator == self._me
            or self._is_lost(place.creator)
            or self._num_expected >= MAX_EXPECTED
        ):
            return False
        self._num_expected += 1
        self.entries[place.reference] = Entry(place.creator, made=False)
        if asker != place.creator.worker:
            self._tell(place.creator, Asked(place.reference))
        return True

    def register(self, message: Register, holder: Peer) -> None:
        """A user says that it holds a fork."""
        if self._is_lost(holder):
            return
        if not self.wants(message.place):
            self._tell(holder, Refused(message.fork))
            return
        forks = self.entries[message.place.reference].forks
        if len(forks) >= MAX_FORKS:
            self._tell(holder, Refused(message.fork))
            return
        known = forks.setdefault(message.fork, holder)
        if known == holder:
            self._tell(holder, Confirmed(message.place.reference, message.fork))

    def share(self, reference: int, number: int, to: Peer) -> None:
        """One of our own references was put into a message as fork ``number``.

        It is counted at once.
        """
        if not self._is_lost(to):
            self.entries[reference].forks[number] = to

    def unshare(self, reference: int, number: int) -> None:
        """A fork less, if there is one of this number."""
        entry = self.entries.get(reference)
        if entry is not None and entry.forks.pop(number, None) is not None:
            self._discard_if_unused(reference, entry)

    def receive(self, place: ValuePlace) -> bool:
        """One of our own references came in a message.

        A handle more, if there is or will be a value.
        """
        if not self.wants(place):
            return False
        self.entries[place.reference].handles += 1
        return True

    def release(self, reference: int) -> None:
        """A handle less."""
        entry = self.entries.get(reference)
        if entry is not None and entry.handles > 0:
            entry.handles -= 1
            self._discard_if_unused(reference, entry)

    def dropped(self, reference: int, number: int, by: Peer) -> None:
        """A user does not need its fork any more."""
        entry = self.entries.get(reference)
        if entry is not None and number in entry.forks and entry.forks[number].matches(by):
            self.unshare(reference, number)

    def not_coming(self, reference: int, by: Peer) -> None:
        """The creator, maybe in a later life, has nothing under way for this value."""
        entry = self.entries.get(reference)
        if entry is not None and not entry.made and entry.creator.worker == by.worker:
            self._fail(reference, entry)

    def lost(self, peer: Peer) -> None:
        """A life of another worker has ended.

        Its forks are dropped, and what it was to ask for will not come.
        """
        for reference, entry in list(self.entries.items()):
            ended = [number for number, holder in entry.forks.items() if holder.ends_with(peer)]
            for number in ended:
                del entry.forks[number]
            if not entry.made and peer in (entry.creator, (entry.creator.worker, ANY_LIFE)):
                self._fail(reference, entry)
            elif not entry.made and entry.creator.worker == peer.worker:
                # the question may be lost with that life
                self._tell(entry.creator, Asked(reference))
            elif ended:
                self._discard_if_unused(reference, entry)

    def _discard_if_unused(self, reference: int, entry: Entry) -> None:
        if entry.made and not entry.forks and not entry.handles:
            del self.entries[reference]
            self.discarded.append(reference)

    def _fail(self, reference: int, entry: Entry) -> None:
        del self.entries[reference]
        self._num_expected -= 1
        self.failed.append(reference)
        for number, holder in entry.forks.items():
            self._tell(holder, Refused(number))
