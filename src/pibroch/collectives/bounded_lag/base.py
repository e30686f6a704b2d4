"""What bounded lag needs of a network.

Numbered messages that are put once and taken once, and word of ranks that are lost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pibroch.collectives.bounded_lag.losses import CLOSED, ENDED, LEFT, STOPPED, WaitPolicy
from pibroch.collectives.bounded_lag.options import BoundedLagOptions
from pibroch.collectives.kernels.ring import copy_bytes
from pibroch.errors import InputError, RankFailedError
from pibroch.kernels.arrays import Bytes, Ints

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch does not export it by name


@dataclass(frozen=True, slots=True)
class Opening:
    """Who opens a transport, and how large.

    Attributes:
        store: of this transport alone.
        rank: of this process in the group.
        members: the group's ranks, at least two, by their numbers in the run.
        num_slots: of each stream.
        options: of the group.
        timeout_s: for all to come, and of each wait later.
        num_streams: of messages that are numbered together.
    """

    store: Store
    rank: int
    members: Sequence[int]
    num_slots: int
    options: BoundedLagOptions
    timeout_s: float
    num_streams: int = 1


class Slot(NamedTuple):
    """Where a message travels.

    Attributes:
        stream: of messages that are numbered together; a transport has one or several.
        number: of the message in it, from 0 in steps of 1.
    """

    stream: int
    number: int


class RankParts(NamedTuple):
    """Memory for, or from, each rank.

    Attributes:
        addresses: int64 ``[W]``.
        sizes: int64 ``[W]``, bytes.
        kept: what keeps that memory alive.
    """

    addresses: Ints
    sizes: Ints
    kept: object = None

    @classmethod
    def of(cls, arrays: Sequence[NDArray[np.generic]]) -> RankParts:
        """One contiguous array a rank."""
        addresses = np.array([each.ctypes.data for each in arrays], np.int64)
        return cls(addresses, np.array([each.nbytes for each in arrays], np.int64), arrays)


class LaggedTransport(ABC):
    """Carries messages between this rank and some or all others of a group.

    A rank's part for itself is not looked at.

    Nobody acknowledges a message. A slot, ``number % num_slots`` of a stream, is used again without
    asking, so whoever calls keeps to a :class:`~pibroch.collectives.bounded_lag.window.LagWindow`
    of so many slots. One thread at a time calls.

    Args:
        opening: whose rank, members, slots and time limit are attributes of the transport, too.
        peers: the ranks that are reached.

    Raises:
        RankFailedError: (waits) when a rank of the group was killed, stopped, or says that it lost
            another one.
        TrainingError: (waits) when a rank lives and sends nothing for the group's time limit.
    """

    def __init__(self, opening: Opening, peers: Iterable[int]) -> None:
        self.rank = opening.rank
        self.world_size = len(opening.members)
        self.members = opening.members
        self.num_slots = opening.num_slots
        self.timeout_s = opening.timeout_s
        self.peers = tuple(sorted(peers))
        # of which this one is a part, and whose peers must hear of a loss
        self.whole: LaggedTransport | None = None

    @abstractmethod
    def put(self, slot: Slot, going: RankParts, only: int | None = None) -> None:
        """Send each peer its part, or the one of them that is named.

        Returns when the memory may be written again.
        """

    def put_beside(self, slot: Slot, going: RankParts, own: int) -> None:
        """:meth:`put` to all peers, and copy this rank's own part to an address.

        An address of 0 leaves that out.
        """
        self.put(slot, going)
        if own:
            copy_bytes(own, int(going.addresses[self.rank]), int(going.sizes[self.rank]))

    def take(self, slot: Slot, coming: RankParts) -> None:
        """Wait for the parts of all peers and copy them to memory of their sizes.

        Raises:
            InputError: for a part of another size.
        """
        policy = WaitPolicy(self.members, self.timeout_s)
        pending = list(self.peers)
        seen = 0
        while pending:
            for p in [p for p in pending if self.has_arrived(slot, p)]:
                part = self.part(slot, p, int(coming.sizes[p]))
                copy_bytes(int(coming.addresses[p]), part.ctypes.data, len(part))
                pending.remove(p)
            if pending:
                seen = self.wait_for_news(seen, slot, policy)

    @abstractmethod
    def has_arrived(self, slot: Slot, peer: int) -> bool:
        """Whether a peer's part is there. Does not wait."""

    @abstractmethod
    def view(self, slot: Slot, peer: int) -> Bytes:
        """A peer's part that is there, to be read.

        Valid until this rank puts the message ``num_slots // 2`` after it.
        """

    def part(self, slot: Slot, peer: int, expected: int) -> Bytes:
        """:meth:`view` of a part that must have so many bytes.

        Raises:
            InputError: for one of another size.
        """
        part = self.view(slot, peer)
        if len(part) != expected:
            raise InputError(
                f"{len(part)} bytes from rank {self.members[peer]} in exchange {slot.number}",
                f"{expected}, which this rank expects",
                "let all ranks agree on the sizes of an exchange",
            )
        return part

    def wait_for_news(self, seen: int, missing: Slot, policy: WaitPolicy | None = None) -> int:
        """Wait until something has arrived since an earlier call; returns how much in all.

        Args:
            seen: what the last call returned, 0 at first.
            missing: the message for which the caller waits; if nothing ever arrives, the error
                names a peer whose part of it is not there.
            policy: of a longer wait, of which this one is a part.
        """
        policy = policy or WaitPolicy(self.members, self.timeout_s)
        while (news := self.sleep(seen)) == seen:
            absent = [p for p in self.peers if not self.has_arrived(missing, p)]
            self.look_at_others(absent, missing.number, policy)
        return news

    @abstractmethod
    def sleep(self, seen: int) -> int:
        """Wait until something has arrived since ``seen``, a tenth of a second at most.

        Returns what :meth:`wait_for_news` returns.
        """

    @abstractmethod
    def look_at_others(self, missing: Sequence[int], number: int, policy: WaitPolicy) -> None:
        """Raise for a rank that is lost: a missing one, or one that another rank has given up."""

    def judge(
        self, states: Mapping[int, str], notes: Mapping[int, int], number: int, policy: WaitPolicy
    ) -> None:
        """:meth:`look_at_others` by states and notes that were read.

        States were read before notes, as a rank leaves its note before it ends.

        Args:
            states: of the processes of those that are missing, see :func:`state_of`.
            notes: of all peers: the rank that one gave up for plus one, CLOSED, or 0.
            number: of the message.
            policy: of this wait.
        """
        for p, note in notes.items():
            if note > 0 and note - 1 != self.rank:
                raise self.lost(note - 1, number, f"lost, says rank {self.members[p]}")
            if note == CLOSED and p in states:
                raise self.lost(p, number, LEFT)
        for p, state in states.items():
            if state == "":
                raise self.lost(p, number, ENDED)
            if policy.is_stopped_for_long(p, state == "T"):
                raise self.lost(p, number, STOPPED)
        policy.check(states, number)

    def lost(self, rank: int, number: int | None, reason: str) -> RankFailedError:
        """The error for a rank of the group that is lost; the others hear of it."""
        with suppress(OSError):
            (self.whole or self).announce(rank)
        return RankFailedError(self.members[rank], number, reason)

    @abstractmethod
    def announce(self, rank: int) -> None:
        """Let the others know that this rank gives up because of one."""

    @abstractmethod
    def close(self) -> None:
        """Say goodbye and give memory, sockets and threads back; peers still take what was put.

        Once is enough.
        """
