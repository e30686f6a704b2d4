"""What bounded lag needs of a network: numbered messages that are put once and taken once, and word of ranks that are lost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.arrays import Bytes, Ints


class Slot(NamedTuple):
    """Where a message travels.

    Attributes:
        stream: of messages that are numbered together; a transport has one or several.
        number: of the message in it, from 0 in steps of 1.
    """

    stream: int
    number: int


class RankParts(NamedTuple):
    """Memory for, or from, each rank; whoever made it keeps it alive.

    Attributes:
        addresses: int64 ``[W]``.
        sizes: int64 ``[W]``, bytes.
    """

    addresses: Ints
    sizes: Ints

    @classmethod
    def of(cls, arrays: Sequence[NDArray[np.generic]]) -> RankParts:
        """One contiguous array a rank."""
        addresses = np.array([each.ctypes.data for each in arrays], np.int64)
        return cls(addresses, np.array([each.nbytes for each in arrays], np.int64))


class LaggedTransport(ABC):
    """Carries messages between this rank and some or all others of a group; what is for oneself is not looked at.

    Nobody acknowledges a message. A slot, ``number % num_slots`` of a stream, is used again without asking, so whoever calls
    keeps to a :class:`~pibroch.collectives.bounded_lag.window.LagWindow` of so many slots. One thread at a time calls.

    Attributes:
        rank, world_size: of the group.
        peers: the ranks that are reached.
        num_slots: of each stream.

    Raises:
        RankFailedError: (waits) when a rank of the group was killed, stopped, or says that it lost another one.
        TrainingError: (waits) when a rank lives and sends nothing for the group's time limit.
    """

    rank: int
    world_size: int
    peers: tuple[int, ...]
    num_slots: int

    @abstractmethod
    def put(self, slot: Slot, going: RankParts, only: int | None = None) -> None:
        """Send each peer its part, or the one of them that is named; returns when the memory may be written again."""

    @abstractmethod
    def put_beside(self, slot: Slot, going: RankParts, own: int) -> None:
        """:meth:`put` to all peers, and copy this rank's own part to an address unless that is 0."""

    @abstractmethod
    def take(self, slot: Slot, coming: RankParts) -> None:
        """Wait for the parts of all peers and copy them to memory of their sizes.

        Raises:
            InputError: for a part of another size.
        """

    @abstractmethod
    def has_arrived(self, slot: Slot, peer: int) -> bool:
        """Whether a peer's part is there. Does not wait."""

    @abstractmethod
    def view(self, slot: Slot, peer: int) -> Bytes:
        """A peer's part that is there, to be read; valid until this rank puts the message ``num_slots // 2`` after it."""

    @abstractmethod
    def wait_for_news(self, seen: int, missing: Slot) -> int:
        """Wait until something has arrived since ``seen``, a result of this method, was returned; 0 at first.

        Args:
            seen: see above.
            missing: of those peers whose part of it is not there one is named if nothing ever comes.
        """

    @abstractmethod
    def close(self) -> None:
        """Say goodbye and give memory, sockets and threads back; peers still take what was put. Once is enough."""
