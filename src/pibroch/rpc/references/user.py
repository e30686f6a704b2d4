"""What a user keeps: its forks, what each waits for, and which forks of other workers it keeps alive meanwhile (pure)."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from pibroch.rpc.references.messages import (
    ANY_LIFE,
    Dropped,
    Message,
    NotComing,
    Peer,
    Register,
    Settled,
    ValuePlace,
)

Tell = Callable[[Peer, Message], None]
IsLost = Callable[[Peer], bool]


class State(enum.Enum):
    """Of a fork: the owner has not answered yet; counts it; has no value for it (or is lost)."""

    PENDING = 0
    CONFIRMED = 1
    GONE = 2


@dataclass(slots=True, eq=False)
class Fork:
    """This worker's right to a value elsewhere.

    Attributes:
        number: of the fork.
        reference: number of the value.
        owner: who holds the value.
        creator: who asked for it.
        parent: whose fork keeps this one's value alive until the owner has confirmed this one.
        children: forks given to others that are not settled yet, and to whom.
        askers: lives of the owner to which others spoke of it, and which want to hear when the
            creation fails.
        released: nobody here wants it any more.
        failure: why it is gone, where more is known than that.
    """

    number: int
    reference: int
    owner: Peer
    creator: Peer
    parent: Peer | None
    state: State = State.PENDING
    children: dict[int, Peer] = field(default_factory=dict)
    askers: set[Peer] = field(default_factory=set)
    released: bool = False
    failure: Exception | None = None

    @property
    def place(self) -> ValuePlace:
        """What it refers to, in the words of a message."""
        return ValuePlace(self.reference, self.owner, self.creator, self.state is State.CONFIRMED)


class UserSide:
    """The user's half of ``ReferenceTable``.

    A fork is dropped when it was released, is confirmed, and each fork that was made of it is
    settled (section 3.3: the sender keeps its fork until the receiver's is confirmed). All events
    may come in any order, twice, or for forks that do not exist.
    """

    def __init__(self, me: Peer, tell: Tell, is_lost: IsLost) -> None:
        self._me = me
        self._tell = tell
        self._is_lost = is_lost
        self.forks: dict[int, Fork] = {}
        self.creations: dict[int, Fork] = {}  # by reference: those whose owner has not answered yet
        self._parents: dict[int, Fork] = {}  # by child

    @property
    def num_children(self) -> int:
        """Forks given to others that are not settled yet."""
        return len(self._parents)

    def create(self, reference: int, number: int, owner: Peer) -> Fork:
        """A fork of a value that the owner is being asked to make."""
        fork = Fork(number, reference, owner, creator=self._me, parent=None)
        self.forks[number] = self.creations[reference] = fork
        if self._is_lost(owner):
            self.gone(fork)
        return fork

    def created(self, fork: Fork, by: Peer) -> None:
        """The owner has answered that it has the value, or what making it raised."""
        if self._is_creation(fork):
            del self.creations[fork.reference]
            fork.askers.discard(by)
            # other lives of the owner, which do not get what this one has
            self._answer_askers(fork)
            fork.owner = by
            fork.state = State.CONFIRMED
            self._drop_if_unused(fork)

    def creation_failed(self, fork: Fork, failure: Exception, owner_lives: bool = True) -> None:
        """The owner was lost first, or could not read what it was asked."""
        if self._is_creation(fork):
            fork.failure = failure
            if owner_lives:  # it may expect the value, because we spoke of it
                fork.askers.add(fork.owner)
            self.gone(fork)

    def receive(self, place: ValuePlace, number: int, sender: Peer) -> Fork | None:
        """A fork that came in a message; ``None`` when there is one of this number already."""
        if number in self.forks:
            return None
        fork = Fork(number, place.reference, place.owner, place.creator, parent=sender)
        self.forks[number] = fork
        if self._is_lost(place.owner):
            self.gone(fork)
        elif sender == place.owner:  # which counted it when it sent it
            fork.state = State.CONFIRMED
            fork.parent = None
        else:
            self._tell(place.owner, Register(place, number))
        return fork

    def share(self, fork: Fork, child: int, to: Peer) -> None:
        """``fork`` was put into a message as ``child``."""
        if fork.state is not State.GONE and not self._is_lost(to):
            fork.children[child] = to
            self._parents[child] = fork

    def unshare(self, child: int) -> None:
        """Our fork is not needed for ``child`` any more."""
        fork = self._parents.pop(child, None)
        if fork is not None:
            del fork.children[child]
            self._drop_if_unused(fork)

    def settled(self, child: int, by: Peer) -> None:
        """The receiver does not need our fork for ``child`` any more."""
        fork = self._parents.get(child)
        if fork is not None and fork.children[child].matches(by):
            self.unshare(child)

    def confirmed(self, reference: int, number: int, by: Peer) -> None:
        """The owner counts our fork. What it was asked to make is confirmed by its answer alone."""
        fork = self.forks.get(number)
        # we registered twice, see ``lost``, and one of both came after we had dropped it
        if fork is None:
            self._tell(by, Dropped(reference, number))
            return
        if not fork.owner.matches(by) or fork.state is not State.PENDING or self._is_creation(fork):
            return
        fork.owner = by
        fork.state = State.CONFIRMED
        self._settle(fork)
        self._drop_if_unused(fork)

    def refused(self, number: int, by: Peer) -> None:
        """The owner, maybe in a later life, has nothing for our fork."""
        fork = self.forks.get(number)
        if fork is not None and fork.owner.worker == by.worker:
            self.gone(fork)

    def release(self, fork: Fork) -> None:
        """Nobody here wants it any more."""
        fork.released = True
        self._drop_if_unused(fork)

    def asked(self, reference: int, by: Peer) -> None:
        """The owner wants to know whether we will ask it for this value."""
        fork = self.creations.get(reference)
        if fork is None or not fork.owner.matches(by):
            self._tell(by, NotComing(reference))
        else:
            fork.askers.add(by)

    def lost(self, peer: Peer) -> None:
        """A life of another worker has ended (``ANY_LIFE``: the worker cannot be reached).

        A creation whose owner's life is not known yet ends with its request: see
        ``creation_failed``.
        """
        for fork in list(self.forks.values()):
            # when no life of the owner can be reached, it will never hear of the forks that it has
            # not confirmed
            unheard = peer == (fork.owner.worker, ANY_LIFE) and fork.state is State.PENDING
            if fork.owner == peer or unheard:
                self.gone(fork)
            elif (
                fork.state is State.PENDING
                and fork.owner.worker == peer.worker
                and not self._is_creation(fork)
            ):
                # again: it may be lost with that life
                self._tell(fork.owner, Register(fork.place, fork.number))
            for child in [child for child, to in fork.children.items() if to.ends_with(peer)]:
                self.unshare(child)

    def gone(self, fork: Fork) -> None:
        """There is no value any more.

        Nothing is kept, and the parent need not keep anything either.
        """
        fork.state = State.GONE
        for child in fork.children:
            del self._parents[child]
        fork.children.clear()
        self._answer_askers(fork)
        self._settle(fork)
        self._forget(fork)

    def _is_creation(self, fork: Fork) -> bool:
        return self.creations.get(fork.reference) is fork

    def _answer_askers(self, fork: Fork) -> None:
        for asker in fork.askers:
            self._tell(asker, NotComing(fork.reference))
        fork.askers.clear()

    def _settle(self, fork: Fork) -> None:
        if fork.parent is not None:
            self._tell(fork.parent, Settled(fork.number))
            fork.parent = None

    def _drop_if_unused(self, fork: Fork) -> None:
        if fork.released and not fork.children and fork.state is State.CONFIRMED:
            self._tell(fork.owner, Dropped(fork.reference, fork.number))
            fork.state = State.GONE
            self._forget(fork)

    def _forget(self, fork: Fork) -> None:
        self.forks.pop(fork.number, None)
        if self._is_creation(fork):
            del self.creations[fork.reference]
