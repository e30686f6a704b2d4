"""Messages between the ranks of one host by way of shared memory, any number of them under way.

Each rank has one segment, its mailbox, that the others map: a head, slots and room. It copies a
message into its room and says in a slot for the receiver where it lies; the receiver copies it out
and counts it, in a word of the mailbox. What was counted makes room for later messages. Room is
never waited for here: :meth:`Mailbox.put` says that there is none. Segments have no names, so that
nothing stays behind a killed rank; only pages that were written take memory.

Legend of a mailbox: futex word, sleepers and subscribers in its first three lines of 64 bytes; from
COUNTERS on a line for each rank with what that one took and what it expects in all; then slots, one
for each rank in the beginning; then room.
"""

from __future__ import annotations

import socket
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pibroch.collectives.kernels import mailbox as queue
from pibroch.collectives.kernels.ring import wait_for_change
from pibroch.wire.alive import state_behind
from pibroch.wire.arena import SHARED_BLOCK_BYTES, SHARED_SEGMENT_BYTES, Arena, NeedSegment
from pibroch.wire.segment_trade import receive_segment, send_segment
from pibroch.wire.segments import ForeignSegment, OwnSegment

ROOM_BYTES = SHARED_SEGMENT_BYTES
LARGEST_BYTES = SHARED_BLOCK_BYTES
"""Of a rank's messages that were not taken yet, and of one message."""
NUM_SLOTS = 1 << 16
"""A rank's messages that were not taken yet, those without room included."""
SUBSCRIBERS = 128
COUNTERS = 4096
EXPECTED = 8
LINE = 64
SLEEP_US = 100_000
EFFORT = (20, 0, 50, 0, 32)
"""How a wait spends its time, see :data:`pibroch.collectives.kernels.ring.SPINS`.

It sleeps soon, since the cores have models to compute.
"""


class Arrival(NamedTuple):
    """A message that is there.

    Attributes:
        nbytes: its size.
        place: in the sender's segment; 0 for one that comes by another way.
        following: the slot after it.
    """

    nbytes: int
    place: int
    following: int


@dataclass(slots=True)
class _Queues:
    """To and from one rank; slots are offsets, words are addresses.

    Attributes:
        memory: its mailbox.
        slot: of this rank's, which its next message will be said in.
        left: slot and place of what it has not been seen to have taken.
        num_left, num_freed: messages that it was left, and that were seen to be taken.
        cursor: of its slots, the one where the next message for this rank will be said.
        taken, taken_there: what it counts here and this rank there, before what each expects.
    """

    memory: ForeignSegment
    slot: int
    cursor: int
    taken: int
    taken_there: int
    left: deque[tuple[int, int]] = field(default_factory=deque)
    num_left: int = 0
    num_freed: int = 0


class Mailbox:
    """See the module; one thread at a time may call.

    :meth:`sleep` and :meth:`is_lost` are excepted.

    Args:
        links: a connected Unix socket to each other rank of the host; they belong to the mailbox
            from now on.
        rank, world_size: of the group, in which ranks of other hosts may be.
        timeout_s: for all to send their segments.
    """

    def __init__(
        self,
        links: dict[int, socket.socket],
        rank: int,
        world_size: int,
        timeout_s: float,
    ) -> None:
        self._links = links
        self.peers = tuple(links)
        slots = COUNTERS + -(-world_size * LINE // 4096) * 4096
        self._room = -(-(slots + NUM_SLOTS * queue.SLOT_BYTES) // 4096) * 4096
        self._own = OwnSegment.create(self._room + ROOM_BYTES)
        self.futex = self._own.address
        self._free_slots = [
            slots + each * queue.SLOT_BYTES for each in reversed(range(world_size, NUM_SLOTS))
        ]
        self._arena = Arena()
        self._arena.add_segment(0, ROOM_BYTES)
        self._head = np.zeros(3, np.int64)
        self._effort = np.array(EFFORT, np.int64)
        for link in links.values():
            link.settimeout(timeout_s)
            send_segment(link, self._own)
        self._queues: dict[int, _Queues] = {}
        for p, link in links.items():
            segment = receive_segment(link)
            self._queues[p] = _Queues(
                segment,
                slots + p * queue.SLOT_BYTES,
                slots + rank * queue.SLOT_BYTES,
                self.futex + COUNTERS + p * LINE,
                segment.address + COUNTERS + rank * LINE,
            )
        self._own.close_fd()

    def put(self, p: int, address: int, nbytes: int) -> bool:
        """Leave a rank a message of at most LARGEST_BYTES.

        Returns false, with nothing done, when there is no room for it.
        """
        self._make_room()
        if not self._free_slots:
            return False
        place = self._arena.allocate(nbytes)
        if isinstance(place, NeedSegment):
            return False
        self._leave(p, self._room + place.offset, address, nbytes)
        return True

    def announce(self, p: int, nbytes: int) -> bool:
        """Announce to a rank a message that comes by another way, in its turn.

        Returns false when no slot is free.
        """
        self._make_room()
        if self._free_slots:
            self._leave(p, 0, 0, nbytes)
            return True
        return False

    def expect(self, p: int) -> None:
        """Let a rank know that one more message of its own is expected here, and has memory."""
        queues = self._queues[p]
        there = queues.memory.address
        queue.count(queues.taken_there + EXPECTED, there + SUBSCRIBERS, there)

    def is_expected(self, p: int) -> bool:
        """Whether a rank expects the next message for it already."""
        queues = self._queues[p]
        expected: int = queue.shown(queues.taken + EXPECTED)
        return expected > queues.num_left

    def arrival(self, p: int) -> Arrival | None:
        """A rank's next message, if it is there."""
        queues = self._queues[p]
        if not queue.look(queues.memory.address + queues.cursor, self._head):
            return None
        return Arrival(*self._head.tolist())

    def take(self, p: int, arrival: Arrival, address: int) -> None:
        """Copy a rank's message, the one that is next, to an address.

        One that comes by another way is only counted.
        """
        queues = self._queues[p]
        there = queues.memory.address
        nbytes = arrival.nbytes if arrival.place else 0
        queues.cursor = arrival.following
        queue.take(
            address, there + arrival.place, nbytes, queues.taken_there, there + SUBSCRIBERS, there
        )

    def subscribe(self, by: int) -> None:
        """Change how many sends wait to be woken when others take, or expect, a message."""
        queue.change(self.futex + SUBSCRIBERS, by)

    def shown(self) -> int:
        """The futex word; it changes when something may have arrived."""
        return queue.shown(self.futex)

    def sleep(self, seen: int) -> bool:
        """Wait until the futex word differs, a tenth of a second at most; whether it does."""
        shown: int = wait_for_change(self.futex, seen, self._effort, SLEEP_US)
        return shown != seen

    def is_lost(self, p: int) -> bool:
        """Whether a rank has ended, or closed its mailbox. What it left can still be taken."""
        return state_behind(self._links[p]) == ""

    def close(self) -> None:
        """Give sockets back; others still take what was left for them.

        Memory goes with this object.
        """
        for link in self._links.values():
            with suppress(OSError):
                # a process that this one has forked may have the socket, too
                link.shutdown(socket.SHUT_RDWR)
            link.close()

    def _leave(self, p: int, place: int, address: int, nbytes: int) -> None:
        queues = self._queues[p]
        following = self._free_slots.pop()
        queue.leave(
            self.futex, queues.slot, following, place, address, nbytes, queues.memory.address
        )
        queues.left.append((queues.slot, place))
        queues.slot = following
        queues.num_left += 1

    def _make_room(self) -> None:
        """Take back what was taken, and its slots."""
        for queues in self._queues.values():
            if not queues.left:
                continue
            for _ in range(queue.shown(queues.taken) - queues.num_freed):
                slot, place = queues.left.popleft()
                queues.num_freed += 1
                self._free_slots.append(slot)
                if place:
                    self._arena.free(0, place - self._room)
