"""Ranks that are threads of one process."""

import threading

import pytest
import torch

from pibroch.errors import PibrochError
from pibroch.sim.world import VirtualWorld


class Nothing:
    """An account of nothing."""

    def post(self, members, going):
        pass

    def begin_to_wait(self):
        pass

    def end_to_wait(self):
        pass


def world(size, ranks_per_host=1):
    return VirtualWorld(size, ranks_per_host, {rank: Nothing() for rank in range(size)})


def test_messages_are_those_of_ranks():
    def program(ranks):
        channel = ranks.open_channel()
        values = channel.gather({"rank": ranks.rank, "host": ranks.host})
        counts = channel.exchange_counts(torch.arange(3)[:, None] + 10 * ranks.rank)
        group = ranks.groups([[0, 2], [1]])
        inside = group.open_channel().gather(ranks.rank)
        return values, counts.flatten().tolist(), inside

    results = world(3, ranks_per_host=2).run(program)
    hosts = ["host 0", "host 0", "host 1"]
    assert results[1][0] == [{"rank": rank, "host": hosts[rank]} for rank in range(3)]
    assert [counts for _, counts, _ in results] == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]
    assert [inside for _, _, inside in results] == [[0, 2], [1], [0, 2]]


def test_one_runs_at_a_time_and_in_the_same_order():
    def once():
        order = []
        running = threading.Lock()

        def program(ranks):
            channel = ranks.open_channel()
            for step in range(4):
                assert running.acquire(blocking=False)
                order.append((step, ranks.rank))
                running.release()
                channel.barrier()

        world(4).run(program)
        return order

    first = once()
    assert sorted(first) == [(step, rank) for step in range(4) for rank in range(4)]
    assert all(once() == first for _ in range(5))


def test_a_rank_that_fails_ends_all():
    def program(ranks):
        channel = ranks.open_channel()
        channel.barrier()
        if ranks.rank == 1:
            raise ValueError("a bad day")
        channel.barrier()

    with pytest.raises(ValueError, match="a bad day"):
        world(3).run(program)


def test_ranks_that_wait_for_each_other_are_named():
    def program(ranks):
        channels = [ranks.open_channel() for _ in range(2)]
        channels[ranks.rank].barrier()

    with pytest.raises(PibrochError, match="ranks 0, 1 that wait for each other"):
        world(2).run(program)


def test_messages_of_other_sizes_than_are_waited_for():
    def program(ranks):
        counts = [1, 1] if ranks.rank == 0 else [2, 1]  # rank 0 waits for one number of each
        ranks.open_channel().all_to_all(torch.zeros(sum(counts)), counts, [1, 1])

    with pytest.raises(PibrochError, match="8 bytes from rank 1 for rank 0; need the 4"):
        world(2).run(program)
