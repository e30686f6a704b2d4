"""Rings between two "processes" that are two places in this one's memory.

`tests/conformance` has real ones.
"""

import numpy as np
import pytest

from pibroch.collectives.kernels.atomics import FUTEX_CALL
from pibroch.collectives.kernels.ring import numba as ring

pytestmark = pytest.mark.skipif(FUTEX_CALL is None, reason="the number of futex is not known here")
SLOT_BYTES = 192
NUM_SLOTS = 3
SIZE = 3
STRIDE = ring.HEADER_BYTES + SLOT_BYTES
HEAD_BYTES = 256


class Memory:
    """One inbox a process, and the links between them; process 2 is not reached by anybody."""

    def __init__(self):
        nbytes = HEAD_BYTES + SIZE * NUM_SLOTS * STRIDE
        self.inboxes = [np.zeros(nbytes // 8, np.int64) for _ in range(SIZE)]
        self.futexes = [int(inbox.ctypes.data) for inbox in self.inboxes]
        self.links = [np.zeros((SIZE, 3), np.int64) for _ in range(SIZE)]
        for me, other in ((0, 1), (1, 0)):
            self.links[me][other] = (
                self._ring(other, me),
                self._ring(me, other),
                self.futexes[other],
            )

    def _ring(self, owner, sender):
        return self.futexes[owner] + HEAD_BYTES + sender * NUM_SLOTS * STRIDE

    def put(self, me, number, parts, segments=None):
        addresses, sizes = describe(parts)
        segments = np.zeros((SIZE, 2), np.int64) if segments is None else segments
        place = number % NUM_SLOTS * STRIDE
        ring.put(self.links[me], me, place, number + 1, addresses, sizes, segments, 0)

    def take(self, me, number, parts, segments=None, sleep_us=1000):
        addresses, sizes = describe(parts)
        segments = np.zeros((SIZE, 2), np.int64) if segments is None else segments
        pending = (self.links[me][:, 0] != 0).astype(np.int64)
        place = number % NUM_SLOTS * STRIDE
        effort = np.array([10, 10, 40, 0, 4])
        return ring.take(
            self.links[me],
            self.futexes[me],
            place,
            number + 1,
            addresses,
            sizes,
            segments,
            pending,
            effort,
            sleep_us,
        )


def describe(parts):
    return np.array([each.ctypes.data for each in parts]), np.array([each.nbytes for each in parts])


@pytest.mark.parametrize("nbytes", [0, 1, 7, 64, 191, SLOT_BYTES])
def test_messages_arrive_in_their_slots(nbytes):
    memory = Memory()
    for number in range(7):
        sent = [
            np.random.default_rng(number + p).integers(0, 256, nbytes).astype(np.uint8)
            for p in range(SIZE)
        ]
        memory.put(0, number, sent)
        received = [np.zeros(nbytes, np.uint8) for _ in range(SIZE)]
        assert memory.take(1, number, received) == ring.ARRIVED
        assert (received[0] == sent[1]).all() and not received[2].any()


def test_what_is_not_there_is_waited_for_and_reported():
    memory = Memory()
    received = [np.zeros(4, np.uint8)] * SIZE
    assert memory.take(0, 0, received) == ring.PENDING
    memory.put(1, 0, [np.full(4, 9, np.uint8)] * SIZE)
    assert ring.has_arrived(memory.links[0], 1, 0, 1) and not ring.has_arrived(
        memory.links[0], 1, STRIDE, 2
    )
    assert memory.take(0, 0, [np.zeros(5, np.uint8)] * SIZE) == ring.OTHER_SIZE
    assert memory.take(0, 0, received) == ring.ARRIVED and (received[1] == 9).all()


def test_a_slot_that_was_written_again_is_noticed():
    memory = Memory()
    parts = [np.zeros(4, np.uint8)] * SIZE
    memory.put(1, 0, parts)
    memory.put(1, NUM_SLOTS, parts)
    assert memory.take(0, 0, parts) == ring.OVERWRITTEN


def test_large_messages_lie_in_segments():
    memory = Memory()
    room = np.zeros(10_000, np.uint8)
    sent = np.random.default_rng(0).integers(0, 256, 5000).astype(np.uint8)
    segments = np.zeros((SIZE, 2), np.int64)
    segments[1] = 7, room.ctypes.data
    memory.put(0, 0, [sent] * SIZE, segments)
    received = [np.zeros(5000, np.uint8) for _ in range(SIZE)]
    assert memory.take(1, 0, received) == ring.UNKNOWN_SEGMENT
    assert (
        memory.take(1, 0, received, segments=np.array([[7, room.ctypes.data], [0, 0], [0, 0]]))
        == ring.ARRIVED
    )
    assert (received[0] == sent).all()


@pytest.mark.parametrize("offset", [0, 1, 63])
@pytest.mark.parametrize(
    "nbytes", [ring.STREAMED_BYTES - 1, ring.STREAMED_BYTES, ring.STREAMED_BYTES + 129]
)
def test_large_copies_write_exactly_what_they_should(nbytes, offset):
    source = np.random.default_rng(1).integers(0, 256, nbytes).astype(np.uint8)
    room = np.full(nbytes + 256, 7, np.uint8)
    start = -room.ctypes.data % 64 + offset
    ring.copy_bytes(room.ctypes.data + start, source.ctypes.data, nbytes)
    assert (room[start : start + nbytes] == source).all()
    assert (room[:start] == 7).all() and (room[start + nbytes :] == 7).all()


def test_the_bell_tells_of_news():
    memory = Memory()
    effort = np.array([3, 3, 5, 0, 4])
    assert ring.wait_for_change(memory.futexes[0], 0, effort, 1000) == 0
    memory.put(1, 0, [np.zeros(4, np.uint8)] * SIZE)
    assert ring.wait_for_change(memory.futexes[0], 0, effort, 10_000_000) == 1


def test_an_exchange_with_nobody_but_oneself_copies():
    links = np.zeros((1, 3), np.int64)
    effort = np.array([3, 3, 5, 0, 4])
    source = np.arange(5, dtype=np.uint8)
    target = np.zeros(5, np.uint8)
    futex = np.zeros(16, np.int64)
    pending = np.zeros(1, np.int64)
    places = source.ctypes.data, target.ctypes.data
    assert (
        ring.exchange(links, futex.ctypes.data, 0, 0, 1, *places, 5, pending, effort, 1000)
        == ring.ARRIVED
    )
    assert (target == source).all()
