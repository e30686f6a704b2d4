"""The user's side of the reference protocol: its forks of other workers' values (pure)."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from pibroch.rpc.references.messages import (
    ANY_INCARNATION,
    Confirmed,
    CreationQuery,
    Dropped,
    Message,
    NotComing,
    Peer,
    Refused,
    Register,
    Settled,
    ValuePlace,
)

Send = Callable[[Peer, Message], None]
IsLost = Callable[[Peer], bool]


class State(enum.Enum):
    """State of a fork."""

    PENDING = 0  # the owner has not answered yet
    CONFIRMED = 1  # the owner counts the fork
    GONE = 2  # the owner has no value for it, or is lost


@dataclass(slots=True, eq=False)
class Fork:
    """This worker's right to a value elsewhere.

    Attributes:
        number: of the fork.
        reference: number of the value.
        owner: the worker that holds the value.
        creator: who requested it.
        parent: the worker whose fork keeps the value alive until the owner has confirmed this one.
        children: forks sent to others that are not settled yet, and their receivers.
        askers: incarnations of the owner that wait for an answer whether the creation has failed.
        released: whether this worker no longer needs it.
        failure: the error of a value that is gone, if there is one.
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
        """The value that it refers to, for a message."""
        return ValuePlace(self.reference, self.owner, self.creator, self.state is State.CONFIRMED)


class UserSide:
    """The user's half of ``ReferenceTable``.

    A fork is dropped when it was released, is confirmed, and each fork that was made of it is
    settled (section 3.3: the sender keeps its fork until the receiver's is confirmed). All events
    may happen in any order, twice, or for forks that do not exist.
    """

    def __init__(self, me: Peer, send: Send, is_lost: IsLost) -> None:
        self._me = me
        self._send = send
        self._is_lost = is_lost
        self.forks: dict[int, Fork] = {}
        self.creations: dict[int, Fork] = {}  # by reference: those whose owner has not answered yet
        self.parents: dict[int, Fork] = {}  # by child: forks sent to others, not settled yet

    def create(self, reference: int, number: int, owner: Peer) -> Fork:
        """Add a fork of a value that the owner is being requested to create."""
        fork = Fork(number, reference, owner, creator=self._me, parent=None)
        self.forks[number] = self.creations[reference] = fork
        if self._is_lost(owner):
            self.gone(fork)
        return fork

    def created(self, fork: Fork, by: Peer) -> None:
        """Handle the owner's answer that it has the value, or an error in its place."""
        if self._is_creation(fork):
            del self.creations[fork.reference]
            fork.askers.discard(by)
            # other incarnations of the owner, for which no request is under way
            self._answer_askers(fork)
            fork.owner = by
            fork.state = State.CONFIRMED
            self._drop_if_unused(fork)

    def creation_failed(self, fork: Fork, failure: Exception, owner_lives: bool = True) -> None:
        """Handle a failed request: the owner was lost first, or could not read it."""
        if self._is_creation(fork):
            fork.failure = failure
            if owner_lives:  # it may expect the value, as forks of it were sent to others
                fork.askers.add(fork.owner)
            self.gone(fork)

    def receive(self, place: ValuePlace, number: int, sender: Peer) -> Fork | None:
        """Add a fork that arrived in a message; ``None`` when its number exists already."""
        if number in self.forks:
            return None
        fork = Fork(number, place.reference, place.owner, place.creator, parent=sender)
        self.forks[number] = fork
        if self._is_lost(place.owner):
            self.gone(fork)
        elif sender == place.owner:  # the owner counted it when it sent it
            fork.state = State.CONFIRMED
            fork.parent = None
        else:
            self._send(place.owner, Register(place, number))
        return fork

    def share(self, fork: Fork, child: int, to: Peer) -> None:
        """Record that a message carries a new fork ``child`` of ``fork``."""
        if fork.state is not State.GONE and not self._is_lost(to):
            fork.children[child] = to
            self.parents[child] = fork

    def unshare(self, child: int) -> None:
        """Forget ``child``, which no longer needs the fork that it was made of."""
        fork = self.parents.pop(child, None)
        if fork is not None:
            del fork.children[child]
            self._drop_if_unused(fork)

    def settled(self, message: Settled, by: Peer) -> None:
        """Handle the receiver's message that a child is settled."""
        fork = self.parents.get(message.fork)
        if fork is not None and fork.children[message.fork].matches(by):
            self.unshare(message.fork)

    def confirmed(self, message: Confirmed, by: Peer) -> None:
        """Handle the owner's message that it counts a fork.

        A creation is confirmed by the answer to its request alone.
        """
        fork = self.forks.get(message.fork)
        # it was registered twice (see ``lost``), and one of both arrived after it was dropped
        if fork is None:
            self._send(by, Dropped(message.reference, message.fork))
            return
        if not fork.owner.matches(by) or fork.state is not State.PENDING or self._is_creation(fork):
            return
        fork.owner = by
        fork.state = State.CONFIRMED
        self._settle(fork)
        self._drop_if_unused(fork)

    def refused(self, message: Refused, by: Peer) -> None:
        """Handle the owner's message, maybe of a later incarnation, that it has no such value."""
        fork = self.forks.get(message.fork)
        if fork is not None and fork.owner.worker == by.worker:
            self.gone(fork)

    def release(self, fork: Fork) -> None:
        """Record that this worker no longer needs the fork."""
        fork.released = True
        self._drop_if_unused(fork)

    def queried(self, message: CreationQuery, by: Peer) -> None:
        """Handle the owner's query whether a request to create a value is under way."""
        fork = self.creations.get(message.reference)
        if fork is None or not fork.owner.matches(by):
            self._send(by, NotComing(message.reference))
        else:
            fork.askers.add(by)

    def lost(self, peer: Peer) -> None:
        """Handle the end of an incarnation (``ANY_INCARNATION``: the worker cannot be reached).

        A creation whose owner's incarnation is not known yet ends with its request: see
        ``creation_failed``.
        """
        for fork in list(self.forks.values()):
            # an owner that cannot be reached will never confirm this fork
            is_hopeless = (
                peer == (fork.owner.worker, ANY_INCARNATION) and fork.state is State.PENDING
            )
            if fork.owner == peer or is_hopeless:
                self.gone(fork)
            elif (
                fork.state is State.PENDING
                and fork.owner.worker == peer.worker
                and not self._is_creation(fork)
            ):
                # once more, as the first registration may be lost with that incarnation
                self._send(fork.owner, Register(fork.place, fork.number))
            for child in [child for child, to in fork.children.items() if to.ends_with(peer)]:
                self.unshare(child)

    def gone(self, fork: Fork) -> None:
        """Forget a fork whose value is gone, and settle it with its parent."""
        fork.state = State.GONE
        for child in fork.children:
            del self.parents[child]
        fork.children.clear()
        self._answer_askers(fork)
        self._settle(fork)
        self._forget(fork)

    def _is_creation(self, fork: Fork) -> bool:
        return self.creations.get(fork.reference) is fork

    def _answer_askers(self, fork: Fork) -> None:
        for asker in fork.askers:
            self._send(asker, NotComing(fork.reference))
        fork.askers.clear()

    def _settle(self, fork: Fork) -> None:
        if fork.parent is not None:
            self._send(fork.parent, Settled(fork.number))
            fork.parent = None

    def _drop_if_unused(self, fork: Fork) -> None:
        if fork.released and not fork.children and fork.state is State.CONFIRMED:
            self._send(fork.owner, Dropped(fork.reference, fork.number))
            fork.state = State.GONE
            self._forget(fork)

    def _forget(self, fork: Fork) -> None:
        self.forks.pop(fork.number, None)
        if self._is_creation(fork):
            del self.creations[fork.reference]
