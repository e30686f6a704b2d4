"""Bounded-lag messages within a host.

Each rank puts into slots of the others' memory, and nobody else takes part.

A rank has one segment, its inbox, that the others map when the group is made: a head and, for each
stream and sender, a ring of slots. What does not fit a slot travels in a segment of the sender's
for that slot, whose descriptor goes once over the Unix socket and whose id is in the slot's header;
a larger message later brings a larger segment. Since the slot may be written again, its segment may
be, too: nobody is asked. The segments have no names (memfd), so that nothing stays behind a killed
rank.

The sockets carry descriptors, and their ends say that a process has ended. Waiting spins for a
while, gives way, then sleeps.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from pibroch.collectives.bounded_lag.base import LaggedTransport, Opening, RankParts, Slot
from pibroch.collectives.bounded_lag.losses import CLOSED, ENDED, WaitPolicy
from pibroch.collectives.kernels import ring
from pibroch.errors import RankFailedError
from pibroch.kernels.arrays import Bytes, Ints
from pibroch.wire.alive import state_behind
from pibroch.wire.segment_trade import receive_segment, send_segment
from pibroch.wire.segments import ForeignSegment, OwnSegment

HEAD_BYTES = 4096
NOTE = 128
"""Place in the head: number of the rank that this one gave up for, plus one; or CLOSED."""
SLEEP_US = 100_000
"""The longest sleep between two looks at the others."""
SEGMENT_STEP = 1 << 16
MANY_CORES = (400, 1000, 2000, 0, 32)
FEW_CORES = (20, 1000, 50, 0, 32)
"""Effort of a wait, see :data:`pibroch.collectives.kernels.ring.SPINS`.

With a core for each rank of the host, and without.
"""


class SharedMemoryTransport(LaggedTransport):
    """See the module.

    Args:
        opening: of the transport.
        links: a connected Unix socket to each peer; they belong to the transport from now on.
    """

    def __init__(self, opening: Opening, links: dict[int, socket.socket]) -> None:
        super().__init__(opening, links)
        self.slot_bytes = opening.options.slot_bytes
        self._stride = ring.HEADER_BYTES + -(-self.slot_bytes // 64) * 64
        self._sockets = links
        rings = opening.num_streams * self.world_size * self.num_slots
        self._inbox = OwnSegment.create(HEAD_BYTES + rings * self._stride)
        self._foreign = self._trade_inboxes()
        self._links = np.zeros((self.world_size, 3), np.int64)
        for p, foreign in self._foreign.items():
            self._links[p] = (
                self._ring(foreign.address, self.rank),
                self._ring(self._inbox.address, p),
                foreign.address,
            )
        self._is_peer = (self._links[:, 0] != 0).astype(np.int64)
        self._pending = np.zeros(self.world_size, np.int64)
        shape = (opening.num_streams, self.num_slots, self.world_size, 2)
        self._coming = np.zeros(shape, np.int64)
        self._no_segments = np.zeros((self.world_size, 2), np.int64)
        self._own: dict[tuple[int, int, int], OwnSegment] = {}
        self._seen: dict[tuple[int, int, int], ForeignSegment] = {}
        # by rank and id, until a slot names them
        self._unknown: dict[tuple[int, int], ForeignSegment] = {}
        self._num_segments = 0
        # who waits for a rank that wants this very core should not spin on it
        has_cores = len(os.sched_getaffinity(0)) > len(links)
        self._effort = np.array(MANY_CORES if has_cores else FEW_CORES, np.int64)

    @property
    def num_bytes(self) -> int:
        """Of memory that this rank has made for messages.

        Pages of it that nothing was written to take none.
        """
        return self._inbox.nbytes + sum(each.nbytes for each in self._own.values())

    @property
    def num_slot_bytes(self) -> int:
        """Of them, those of the slots of this rank's inbox."""
        return self._inbox.nbytes

    def put(self, slot: Slot, going: RankParts, only: int | None = None) -> None:
        """See :class:`LaggedTransport`."""
        if only is None:
            self.put_beside(slot, going, 0)
            return
        segments = self._segments_for(slot, going, (only,))
        place = self._place(slot)
        address = int(going.addresses[only])
        nbytes = int(going.sizes[only])
        ring.put_one(self._links[only], place, slot.number + 1, address, nbytes, segments[only])

    def put_beside(self, slot: Slot, going: RankParts, own: int) -> None:
        """See :class:`LaggedTransport`."""
        segments = self._segments_for(slot, going, self.peers)
        place = self._place(slot)
        number = slot.number + 1
        ring.put(self._links, self.rank, place, number, going.addresses, going.sizes, segments, own)

    def take(self, slot: Slot, coming: RankParts) -> None:
        """See :class:`LaggedTransport`."""
        self._pending[:] = self._is_peer
        self._take_pending(slot, coming)

    def put_equal(
        self, slot: Slot, source: int, target: int, nbytes: int, coming: RankParts
    ) -> None:
        """:meth:`put_beside` of equal parts of at most ``slot_bytes``.

        All other ranks are peers.

        Args:
            slot: of the message.
            source: address of the parts that go out, in rank order.
            target: where those that come will go; this rank's own one at once.
            nbytes: of each part.
            coming: made to say where the others go.
        """
        place = self._place(slot)
        ring.put_equal(
            self._links,
            self.rank,
            place,
            slot.number + 1,
            source,
            target,
            nbytes,
            coming.addresses,
            coming.sizes,
        )

    def exchange(self, slot: Slot, source: int, target: int, nbytes: int) -> None:
        """:meth:`put` and :meth:`take` of equal parts of at most ``slot_bytes``.

        This rank's own part is included.

        Args:
            slot: of the message.
            source: address of the parts that go out, in rank order.
            target: where those that come go.
            nbytes: of each part.
        """
        place = self._place(slot)
        outcome = ring.exchange(
            self._links,
            self._inbox.address,
            self.rank,
            place,
            slot.number + 1,
            source,
            target,
            nbytes,
            self._pending,
            self._effort,
            SLEEP_US,
        )
        if outcome != ring.ARRIVED:
            addresses = target + nbytes * np.arange(self.world_size)
            self._take_pending(slot, RankParts(addresses, np.full(self.world_size, nbytes)))

    def has_arrived(self, slot: Slot, peer: int) -> bool:
        """See :class:`LaggedTransport`."""
        return bool(ring.has_arrived(self._links, peer, self._place(slot), slot.number + 1))

    def view(self, slot: Slot, peer: int) -> Bytes:
        """See :class:`LaggedTransport`."""
        start = int(self._links[peer, ring.READ]) + self._place(slot) - self._inbox.address
        sequence, nbytes, segment = (
            int(word) for word in self._inbox.array[start : start + 24].view(np.int64)
        )
        assert sequence == slot.number + 1, f"slot of message {slot.number} holds {sequence - 1}"
        if segment:
            return self._mapped(slot, peer, segment).array[:nbytes]
        body = start + ring.HEADER_BYTES
        return self._inbox.array[body : body + nbytes]

    def sleep(self, seen: int) -> int:
        """See :class:`LaggedTransport`."""
        return ring.wait_for_change(self._inbox.address, seen, self._effort, SLEEP_US)

    def wake(self) -> None:
        """Let :meth:`sleep` end in this process; from any thread."""
        ring.wake_sleepers(self._inbox.address)

    def announce(self, rank: int) -> None:
        """See :class:`LaggedTransport`."""
        self._note(rank + 1)

    def look_at_others(self, missing: Sequence[int], number: int, policy: WaitPolicy) -> None:
        """See :class:`LaggedTransport`."""
        states = {p: state_behind(self._sockets[p]) for p in missing}
        notes = {
            p: int(each.array[NOTE : NOTE + 8].view(np.int64)[0])
            for p, each in self._foreign.items()
        }
        self.judge(states, notes, number, policy)

    def close(self) -> None:
        """See :class:`LaggedTransport`."""
        self._note(CLOSED)
        for link in self._sockets.values():
            link.close()
        self._sockets = {}

    def _place(self, slot: Slot) -> int:
        """Of a slot, from the beginning of a pair's ring."""
        first = slot.stream * self.world_size * self.num_slots
        return (first + slot.number % self.num_slots) * self._stride

    def _ring(self, inbox: int, sender: int) -> int:
        """Address of a sender's ring in the inbox at an address."""
        return inbox + HEAD_BYTES + sender * self.num_slots * self._stride

    def _take_pending(self, slot: Slot, coming: RankParts) -> None:
        coming_segments = self._coming[slot.stream, slot.number % self.num_slots]
        place = self._place(slot)
        policy: WaitPolicy | None = None
        while True:
            outcome = ring.take(
                self._links,
                self._inbox.address,
                place,
                slot.number + 1,
                coming.addresses,
                coming.sizes,
                coming_segments,
                self._pending,
                self._effort,
                SLEEP_US,
            )
            if outcome == ring.ARRIVED:
                return
            missing = [int(p) for p in np.flatnonzero(self._pending)]
            if outcome == ring.PENDING:
                policy = policy or WaitPolicy(self.members, self.timeout_s)
                self.look_at_others(
                    [p for p in missing if not self.has_arrived(slot, p)], slot.number, policy
                )
                continue
            # what the kernel could not do with a part that is there: map its segment, or refuse it
            p = next(p for p in missing if self.has_arrived(slot, p))
            self.part(slot, p, int(coming.sizes[p]))

    def _segments_for(self, slot: Slot, going: RankParts, peers: Sequence[int]) -> Ints:
        """The segments in which messages travel: those of the slot, or larger ones.

        There is none where the slot itself will do.
        """
        # mostly so: no copy of the table for it
        if int(going.sizes.max()) <= self.slot_bytes:
            return self._no_segments
        chosen: Ints = self._no_segments.copy()
        for p in peers:
            nbytes = int(going.sizes[p])
            if nbytes > self.slot_bytes:
                key = slot.stream, slot.number % self.num_slots, p
                segment = self._own.get(key)
                if segment is None or segment.nbytes < nbytes:
                    segment = self._own[key] = self._new_segment(p, nbytes)
                chosen[p] = segment.segment_id, segment.address
        return chosen

    def _new_segment(self, p: int, nbytes: int) -> OwnSegment:
        """A segment with room for a message and a quarter more."""
        self._num_segments += 1
        size = -(-nbytes * 5 // 4 // SEGMENT_STEP) * SEGMENT_STEP
        segment = OwnSegment.create(size, self._num_segments)
        try:
            send_segment(self._sockets[p], segment)
        except OSError as error:
            raise self.lost(p, None, ENDED) from error
        segment.close_fd()
        return segment

    def _mapped(self, slot: Slot, p: int, segment_id: int) -> ForeignSegment:
        """The segment that a header names.

        A new one is mapped, and takes the place of the slot's former one.
        """
        key = slot.stream, slot.number % self.num_slots, p
        mapped = self._seen.get(key)
        if mapped is not None and mapped.segment_id == segment_id:
            return mapped
        # they come in the order in which they were made
        while (p, segment_id) not in self._unknown:
            segment = self._receive_segment(p)
            self._unknown[p, segment.segment_id] = segment
        mapped = self._seen[key] = self._unknown.pop((p, segment_id))
        self._coming[key] = segment_id, mapped.address
        return mapped

    def _trade_inboxes(self) -> dict[int, ForeignSegment]:
        for link in self._sockets.values():
            link.settimeout(self.timeout_s)
            with suppress(OSError):  # who has ended sends no memory either
                send_segment(link, self._inbox)
        inboxes = {p: self._receive_segment(p) for p in self._sockets}
        self._inbox.close_fd()
        return inboxes

    def _receive_segment(self, p: int) -> ForeignSegment:
        try:
            return receive_segment(self._sockets[p])
        except OSError as error:
            raise RankFailedError(self.members[p], None, f"{ENDED} ({error})") from error

    def _note(self, text: int) -> None:
        self._inbox.array[NOTE : NOTE + 8].view(np.int64)[0] = text
