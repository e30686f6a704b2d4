"""What the workers that share a reference tell each other, and the form in which a reference travels in a value."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec

MAX_BATCH = 1024
ANY_LIFE = 0


class Peer(NamedTuple):
    """One life of a worker.

    Attributes:
        worker: its id.
        incarnation: which life; ``ANY_LIFE`` when it is not known yet.
    """

    worker: int
    incarnation: int

    def matches(self, other: Peer) -> bool:
        """Whether both may be the same life."""
        return self.worker == other.worker and (
            self.incarnation == other.incarnation
            or ANY_LIFE in (self.incarnation, other.incarnation)
        )

    def ends_with(self, lost: Peer) -> bool:
        """Whether this life is over when ``lost`` is.

        One that is not known was to be the one that is lost now.
        """
        return self == lost or (self.worker == lost.worker and self.incarnation == ANY_LIFE)


class ValuePlace(msgspec.Struct, frozen=True, array_like=True):
    """Which value is meant.

    Attributes:
        reference: its number.
        owner: who holds it.
        creator: who asked for it: the owner itself, or the caller of ``remote``.
        known: the owner is known to have heard of it, so if it does not know it now, it is gone and
            not still to come.
    """

    reference: int
    owner: Peer
    creator: Peer
    known: bool


class Wire(msgspec.Struct, frozen=True, array_like=True):
    """A reference on its way in a message.

    Attributes:
        place: which value it refers to.
        owner_name: the owner's name.
        sender: who sends it and keeps its own fork until this one is settled.
        fork: the number of the fork that the receiver gets.
    """

    place: ValuePlace
    owner_name: Annotated[str, msgspec.Meta(max_length=4096)]
    sender: Peer
    fork: int


class Register(msgspec.Struct, frozen=True, array_like=True, tag="register"):
    """User to owner: I hold this fork."""

    place: ValuePlace
    fork: int


class Confirmed(msgspec.Struct, frozen=True, array_like=True, tag="confirmed"):
    """Owner to user: your fork is counted.

    A user that has no such fork any more answers ``Dropped``.
    """

    reference: int
    fork: int


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """Owner to user: the value of your fork is gone."""

    fork: int


class Settled(msgspec.Struct, frozen=True, array_like=True, tag="settled"):
    """Receiver to sender of a reference: this fork no longer needs yours."""

    fork: int


class Dropped(msgspec.Struct, frozen=True, array_like=True, tag="dropped"):
    """User to owner: I do not need this fork any more.

    Sent once it is confirmed and all that were made of it are settled.
    """

    reference: int
    fork: int


class Asked(msgspec.Struct, frozen=True, array_like=True, tag="asked"):
    """Owner to creator: others speak of a value that you were to ask me for; will you?"""

    reference: int


class NotComing(msgspec.Struct, frozen=True, array_like=True, tag="notcoming"):
    """Creator to owner: I have nothing under way for it.

    It was made and is gone, or could not be asked for.
    """

    reference: int


Message = Register | Confirmed | Refused | Settled | Dropped | Asked | NotComing


class News(msgspec.Struct, frozen=True, array_like=True, tag="refs"):
    """A batch of messages from one life of a worker to one of another.

    Attributes:
        sender: incarnation of the sender.
        receiver: incarnation that it is meant for, ``ANY_LIFE`` when the sender does not know.
        messages: in no order that matters.
    """

    sender: int
    receiver: int
    messages: Annotated[list[Message], msgspec.Meta(max_length=MAX_BATCH)]
