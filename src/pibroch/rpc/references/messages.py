"""Messages between workers that share a reference, and the form of a reference in a value."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec

MAX_BATCH = 1024
ANY_INCARNATION = 0


class Peer(NamedTuple):
    """One incarnation of a worker.

    Attributes:
        worker: its id.
        incarnation: ``ANY_INCARNATION`` while unknown.
    """

    worker: int
    incarnation: int

    def matches(self, other: Peer) -> bool:
        """Whether both may be the same incarnation."""
        return self.worker == other.worker and (
            self.incarnation == other.incarnation
            or ANY_INCARNATION in (self.incarnation, other.incarnation)
        )

    def ends_with(self, lost: Peer) -> bool:
        """Whether this incarnation ends with ``lost``, as an unknown one of that worker does."""
        return self == lost or (self.worker == lost.worker and self.incarnation == ANY_INCARNATION)


class ValuePlace(msgspec.Struct, frozen=True, array_like=True):
    """Which value a message is about.

    Attributes:
        reference: its number.
        owner: the worker that holds it.
        creator: who requested it: the owner itself, or the caller of ``remote``.
        seen_by_owner: whether the owner has certainly had an entry for it: if it has none now, the
            value is gone, and is not still to be created.
    """

    reference: int
    owner: Peer
    creator: Peer
    seen_by_owner: bool


class Wire(msgspec.Struct, frozen=True, array_like=True):
    """A reference in a message.

    Attributes:
        place: the value that it refers to.
        owner_name: the owner's name.
        sender: the worker that sends it, and keeps its own fork until this one is settled.
        fork: the number of the fork that the receiver gets.
    """

    place: ValuePlace
    owner_name: Annotated[str, msgspec.Meta(max_length=4096)]
    sender: Peer
    fork: int


class Register(msgspec.Struct, frozen=True, array_like=True, tag="register"):
    """User to owner: the sender holds this fork."""

    place: ValuePlace
    fork: int


class Confirmed(msgspec.Struct, frozen=True, array_like=True, tag="confirmed"):
    """Owner to user: the receiver's fork is counted.

    A user that no longer has such a fork answers ``Dropped``.
    """

    reference: int
    fork: int


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """Owner to user: the value of the receiver's fork is gone."""

    fork: int


class Settled(msgspec.Struct, frozen=True, array_like=True, tag="settled"):
    """Receiver to sender of a reference: this fork no longer needs that of the sender."""

    fork: int


class Dropped(msgspec.Struct, frozen=True, array_like=True, tag="dropped"):
    """User to owner: the user no longer needs this fork.

    Sent once the fork is confirmed and all forks that were made of it are settled.
    """

    reference: int
    fork: int


class CreationQuery(msgspec.Struct, frozen=True, array_like=True, tag="asked"):
    """Owner to creator: others refer to a value that is not created; will its request arrive?"""

    reference: int


class NotComing(msgspec.Struct, frozen=True, array_like=True, tag="notcoming"):
    """Creator to owner: no request for the value is under way.

    It was created and is gone, or the request could not be sent.
    """

    reference: int


Message = Register | Confirmed | Refused | Settled | Dropped | CreationQuery | NotComing


class MessageBatch(msgspec.Struct, frozen=True, array_like=True, tag="refs"):
    """A batch of messages from one incarnation of a worker to one of another.

    Attributes:
        sender: incarnation of the sender.
        receiver: incarnation that it is for, ``ANY_INCARNATION`` if the sender does not know it.
        messages: in any order.
    """

    sender: int
    receiver: int
    messages: Annotated[list[Message], msgspec.Meta(max_length=MAX_BATCH)]
