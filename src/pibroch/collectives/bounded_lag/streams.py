"""Bounded-lag messages over a stream to each peer.

They are frames of a head and a part, which a thread for each peer reads as they arrive.

The threads keep what came until it is taken, two windows' worth at most, so that nobody who sends
waits for somebody who computes. They also answer pings: a process that is stopped does not.
"""

from __future__ import annotations

import ctypes
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from pibroch.collectives.bounded_lag.base import LaggedTransport, Opening, RankParts, Slot
from pibroch.collectives.bounded_lag.losses import ENDED, LEFT, LOST_HOST, STOPPED, WaitPolicy
from pibroch.kernels.arrays import Bytes

PING = -1
PONG = -2
LOST = -3
GOODBYE = -4
"""In place of a stream: are you there; yes; I give up because of the rank that the number says.

Nothing more will come.
"""
PING_AFTER_S = 0.5
SLEEP_S = 0.1
END_S = 2.0
"""How long closing waits for the other ends."""
NOTHING = np.empty(0, np.uint8)


class StreamTransport(LaggedTransport):
    """What streams of every kind have in common; call :meth:`listen` when they are open.

    Args:
        opening: of the transport.
        peers: the ranks at their other ends.
        on_news: called when something has arrived, from any thread.
    """

    def __init__(
        self,
        opening: Opening,
        peers: Iterable[int],
        on_news: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(opening, peers)
        self._on_news = on_news
        self._changed = threading.Condition()
        self._news = 0
        # those that have arrived, by stream, number of the message, and peer
        self._parts: dict[tuple[int, int, int], Bytes] = {}
        self._ended: dict[int, str] = {}
        self._blamed: tuple[int, int] | None = None  # by whom, and who
        self._pinged: set[int] = set()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._read, args=(p,), name=f"pibroch-lag-{p}", daemon=True)
            for p in self.peers
        ]

    def listen(self) -> None:
        """Begin to read."""
        for thread in self._threads:
            thread.start()

    @abstractmethod
    def send(self, peer: int, slot: Slot, part: Bytes = NOTHING) -> None:
        """Send a part, or what ranks tell each other besides, after all earlier ones.

        From any thread. The memory of the part may be written to when this returns.

        Raises nothing when the peer is gone: its thread notices that, too.
        """

    @abstractmethod
    def receive(self, peer: int) -> tuple[Slot, Bytes] | None:
        """What a peer sends next, for which this waits; ``None`` when its stream has ended."""

    @abstractmethod
    def end(self, timeout_s: float) -> None:
        """Let what is under way go out, and end the streams, in this time.

        :meth:`receive` ends with them.
        """

    def is_host_lost(self, peer: int) -> bool:
        """Whether a peer's host is known to be lost. Does not wait."""
        return False

    def put(self, slot: Slot, going: RankParts, only: int | None = None) -> None:
        """See :class:`LaggedTransport`."""
        with self._changed:
            # parts that were only looked at, by `view`: the window says that nobody needs them now
            oldest = slot.number - self.num_slots // 2
            for key in [key for key in self._parts if key[0] == slot.stream and key[1] <= oldest]:
                del self._parts[key]
        for p in self.peers if only is None else (only,):
            self.send(p, slot, bytes_at(int(going.addresses[p]), int(going.sizes[p])))

    def take(self, slot: Slot, coming: RankParts) -> None:
        """See :class:`LaggedTransport`."""
        super().take(slot, coming)
        with self._changed:
            for p in self.peers:
                del self._parts[slot.stream, slot.number, p]

    def has_arrived(self, slot: Slot, peer: int) -> bool:
        """See :class:`LaggedTransport`."""
        return (slot.stream, slot.number, peer) in self._parts

    def view(self, slot: Slot, peer: int) -> Bytes:
        """See :class:`LaggedTransport`."""
        return self._parts[slot.stream, slot.number, peer]

    def sleep(self, seen: int) -> int:
        """See :class:`LaggedTransport`."""
        with self._changed:
            self._changed.wait_for(lambda: self._news != seen, SLEEP_S)
            return self._news

    def announce(self, rank: int) -> None:
        """See :class:`LaggedTransport`."""
        for p in self.peers:
            if p not in self._ended and p != rank:
                self.send(p, Slot(LOST, rank))

    def look_at_others(self, missing: Sequence[int], number: int, policy: WaitPolicy) -> None:
        """See :class:`LaggedTransport`."""
        ended = dict(self._ended)
        if self._blamed is not None:  # looked at after the ends: who ends has said so before
            by, rank = self._blamed
            raise self.lost(rank, number, f"lost, says rank {self.members[by]}")
        for p in missing:
            if p in ended:
                raise self.lost(p, number, ended[p])
            if self.is_host_lost(p):
                raise self.lost(p, number, LOST_HOST)
            if policy.seconds > PING_AFTER_S:
                if policy.is_stopped_for_long(p, p in self._pinged):
                    raise self.lost(p, number, STOPPED)
                if p not in self._pinged:
                    self._pinged.add(p)
                    self.send(p, Slot(PING, 0))
        policy.check(missing, number)

    def close(self) -> None:
        """See :class:`LaggedTransport`."""
        if self._is_closed:
            return
        self._is_closed = True
        for p in self.peers:
            if self._ended.get(p) != ENDED:
                self.send(p, Slot(GOODBYE, 0))
        self.end(END_S)
        for thread in self._threads:
            thread.join(END_S)

    def _read(self, peer: int) -> None:
        """A peer's thread."""
        while (message := self.receive(peer)) is not None:
            (stream, number), part = message
            if stream == PING:
                self.send(peer, Slot(PONG, 0))
                continue
            with self._changed:
                if stream == PONG:
                    self._pinged.discard(peer)
                elif stream == LOST and number != self.rank:
                    # the first word counts: later ones follow from it
                    self._blamed = self._blamed or (peer, number)
                elif stream == GOODBYE:
                    self._ended[peer] = LEFT
                elif stream >= 0:
                    self._parts[stream, number, peer] = part
                self._news += 1
                self._changed.notify_all()
            self._on_news()
            if stream == GOODBYE:
                break
        with self._changed:
            self._ended.setdefault(peer, ENDED)
            self._news += 1
            self._changed.notify_all()
        self._on_news()


def bytes_at(address: int, nbytes: int) -> Bytes:
    """Memory as an array; whoever has the address keeps it alive."""
    if nbytes == 0:
        return NOTHING
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
