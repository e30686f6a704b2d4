"""What channels promise, of those over shared memory.

Without room, without slots, beside gloo, with ranks that stop or end.
"""

import os
import signal
import time

import host_cases as cases
import pytest
from world import World

from pibroch.wire.alive import state_of

SECONDS_STOPPED = 3.0


@pytest.mark.parametrize("expects_first", [True, False])
def test_messages_past_the_room_arrive_in_order(worlds, expects_first):
    """With memory for them at the receiver the sender is done although nobody has taken one.

    Else it waits for room.
    """
    (first, deferred), (second, _) = worlds(2).run(cases.past_the_room, expects_first)
    assert first and second and deferred == 0


@pytest.mark.parametrize("size", [2, 3])
def test_messages_past_the_slots_arrive_in_order(worlds, size):
    assert worlds(size).run(cases.few_slots, size + 3, 20) == [True] * size


def test_a_rank_that_shares_no_memory_is_reached_by_gloo(worlds):
    for rank, (near, received) in enumerate(worlds(3).run(cases.mixed)):
        assert near == [[1], [0], []][rank]
        assert received == [[10.0 * p + rank] for p in range(3) if p != rank]


def test_another_size_is_an_error(worlds):
    first, second = worlds(2).run(cases.other_sizes)
    assert first is None and "20 bytes where 24" in second


def test_who_waits_in_vain_sleeps_and_names_whom_it_waited_for(worlds):
    (message, used), _ = worlds(2).run(cases.late)
    assert "ranks [1] in 0.5 s" in message and used < 0.1


def test_a_rank_may_be_stopped_for_longer_than_losses_take_to_be_noticed():
    world = World(2)
    stopped = world._processes[1].pid
    try:
        world.ask(cases.stop_before_sending)
        assert not world._pipes[0].poll(SECONDS_STOPPED)
        deadline = time.monotonic() + 60
        while state_of(stopped) != "T":
            assert time.monotonic() < deadline
        os.kill(stopped, signal.SIGCONT)
        assert world.answer(0)[0] == [1.0] * 3
        world.answer(1)
    finally:
        os.kill(stopped, signal.SIGCONT)
        world.close()


def test_channels_of_several_groups_and_threads_overlap(worlds):
    num = 200
    for rank, actual in enumerate(worlds(3).run(cases.several_threads, 3, num)):
        for members, total in zip([3, 2 if rank < 2 else 0, 3], actual, strict=True):
            want = sum((1 + i) * (members * i + members * (members - 1) // 2) for i in range(num))
            assert total == (want if members else None)


def test_nothing_is_left_in_dev_shm_and_a_killed_rank_is_named():
    before = set(os.listdir("/dev/shm"))
    world = World(3)
    try:
        import transport_cases

        world.ask(transport_cases.lose_a_peer, "host", 1, "pairs")
        for message, seconds in (world.answer(0), world.answer(2)):
            assert "rank 1" in message and seconds < 5
        assert set(os.listdir("/dev/shm")) <= before
    finally:
        world.close()


def test_channels_share_memory_unless_the_environment_says_gloo(worlds):
    assert worlds(2).run(cases.kinds) == [["HostTransport", "HostTransport", "GlooTransport"]] * 2
