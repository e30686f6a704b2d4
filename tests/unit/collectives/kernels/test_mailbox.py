"""Queues in shared memory, writer and reader in one process: order, reuse of slots, counters."""

import numpy as np
import pytest

from pibroch.collectives.kernels.mailbox import numba as queue

FUTEX = 0
SUBSCRIBERS = 128
COUNTER = 192
SLOTS = 256
ROOM = 1024


@pytest.fixture
def memory():
    raw = np.zeros(8192 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + 8192]


def words(memory, place):
    return memory[place : place + 8].view(np.int64)


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 1000])
def test_a_message_lies_where_its_slot_says(memory, nbytes):
    base = memory.ctypes.data
    head = np.zeros(3, np.int64)
    source = np.arange(nbytes + 1, dtype=np.uint8)
    target = np.full(nbytes + 1, 99, np.uint8)
    assert not queue.look(base + SLOTS, head)
    queue.leave(base, SLOTS, SLOTS + 64, ROOM, source.ctypes.data, nbytes, base + FUTEX)
    assert queue.look(base + SLOTS, head) and head.tolist() == [nbytes, ROOM, SLOTS + 64]
    queue.take(
        target.ctypes.data, base + ROOM, nbytes, base + COUNTER, base + SUBSCRIBERS, base + FUTEX
    )
    assert target[:nbytes].tolist() == source[:nbytes].tolist() and target[nbytes] == 99
    assert queue.shown(base + COUNTER) == 1


def test_a_slot_that_is_used_again_is_not_taken_for_what_it_said(memory):
    base = memory.ctypes.data
    head = np.zeros(3, np.int64)
    slots = [SLOTS, SLOTS + 64]
    for number in range(6):
        queue.leave(base, slots[number % 2], slots[(number + 1) % 2], 0, 0, number, base + FUTEX)
        assert queue.look(base + slots[number % 2], head) and head[0] == number
        assert not queue.look(base + slots[(number + 1) % 2], head)


def test_who_wishes_to_hear_of_counts_is_woken(memory):
    base = memory.ctypes.data
    queue.count(base + COUNTER, base + SUBSCRIBERS, base + FUTEX)
    assert words(memory, FUTEX)[0] == 0
    queue.change(base + SUBSCRIBERS, 1)
    queue.count(base + COUNTER, base + SUBSCRIBERS, base + FUTEX)
    assert words(memory, FUTEX)[0] == 1 and words(memory, COUNTER)[0] == 2
