"""What each rank does in the tests of channels."""

import ctypes
import gc
import os
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from pibroch.collectives import Ranks, Topology

DTYPES = (torch.float32, torch.int64, torch.uint8, torch.bfloat16)


def rows_from_to(sender, receiver):
    return (3 * sender + receiver) % 4


def all_to_all(channel):
    """Ragged rows of every type: rank r sends rows of the value 10 r + p to rank p."""
    rank = channel.ranks.rank
    size = channel.ranks.world_size
    send_counts = [rows_from_to(rank, p) for p in range(size)]
    receive_counts = [rows_from_to(p, rank) for p in range(size)]
    values = torch.repeat_interleave(
        torch.tensor([10 * rank + p for p in range(size)]), torch.tensor(send_counts)
    )
    rows = values[:, None].repeat(1, 2)
    return [channel.all_to_all(rows.to(dtype), send_counts, receive_counts) for dtype in DTYPES]


def nothing(channel):
    size = channel.ranks.world_size
    everywhere = channel.all_to_all(torch.empty(0, 3), [0] * size, [0] * size)
    only_to_first = [0] * size
    send_counts = [1, *only_to_first[1:]]
    receive_counts = [1] * size if channel.ranks.rank == 0 else only_to_first
    return everywhere, channel.all_to_all(torch.ones(1, 3), send_counts, receive_counts)


def counts(channel):
    rank = channel.ranks.rank
    size = channel.ranks.world_size
    return channel.exchange_counts(torch.tensor([[rank, p, 100 * rank + p] for p in range(size)]))


def gathered(channel):
    rank = channel.ranks.rank
    channel.barrier()
    values = channel.gather(
        {"rank": rank, "name": "ü" * (rank * 3), "none": None, "list": [rank] * rank}
    )
    return values, channel.gather_tensors(torch.full((2 * rank, 3), float(rank)))


def reduced(channel):
    """Three sums under way at once, one of them in an order of its own."""
    rank = channel.ranks.rank
    generator = torch.Generator().manual_seed(rank)
    tensors = [torch.randn(1000, generator=generator), torch.arange(5) + rank, torch.zeros(0)]
    waits = [channel.all_reduce(tensor) for tensor in tensors]
    for wait in reversed(waits):
        wait()
    return tensors


def overlapping(channel):
    """Sums on a second channel are started first and waited for last."""
    other = channel.ranks.open_channel()
    rank = channel.ranks.rank
    sums = [torch.full((50_000,), float(rank + i)) for i in range(3)]
    waits = [other.all_reduce(each) for each in sums]
    values = [channel.gather(rank) for _ in range(3)]
    for wait in waits:
        wait()
    other.close()
    return values, [each.unique().tolist() for each in sums]


def traffic(channel):
    """Bytes that each kind of collective counts, as (sent, received).

    Those of rows and of a sum by rank.
    """
    ranks = Ranks(channel.ranks.rank, channel.ranks.world_size)
    own = ranks.open_channel()
    rank = ranks.rank
    size = ranks.world_size
    results = []

    def measure(collective):
        sent = ranks.traffic.sent
        received = ranks.traffic.received
        before = Counter(ranks.traffic.sent_to), Counter(ranks.traffic.received_from)
        collective()
        results.append((ranks.traffic.sent - sent, ranks.traffic.received - received))
        return ranks.traffic.sent_to - before[0], ranks.traffic.received_from - before[1]

    send_counts = [rows_from_to(rank, p) for p in range(size)]
    receive_counts = [rows_from_to(p, rank) for p in range(size)]
    rows = measure(
        lambda: own.all_to_all(torch.zeros(sum(send_counts), 2), send_counts, receive_counts)
    )
    total = measure(lambda: own.all_reduce(torch.zeros(12, dtype=torch.float64))())
    measure(lambda: own.exchange_counts(torch.zeros(size, 3, dtype=torch.int64)))
    own.close()
    return results, rows, total


def groups(channel):
    """A partition, its peers' groups and a group of one.

    Returns who is where, what is shared, and what travelled to whom.
    """
    run = Ranks(channel.ranks.rank, 4)
    run.explain = lambda error: error
    tower = run.groups([[0, 1], [3, 2]])
    peers = run.groups([[0, 2], [1, 3]])
    alone = run.group([1])
    patient = run.patient(7.0)
    reported = []
    for group in (tower, peers, patient):
        own = group.open_channel()
        reported.append(own.gather([group.rank, group.rank_in_run, group.are_all]))
        total = torch.full((4,), float(run.rank))
        own.all_reduce(total)()
        reported.append(total.tolist())
        own.close()
    inner = tower.group([1])  # ranks of a group are numbered within it
    shared = all(
        (each.traffic, each.communication, each.explain)
        == (run.traffic, run.communication, run.explain)
        for each in (tower, peers, patient)
    )
    limits = tower.timeout_s, peers.timeout_s, patient.timeout_s
    members = [None if each is None else each.members for each in (tower, peers, alone, inner)]
    traffic = run.traffic
    totals = traffic.sent, traffic.received
    run.communication.end()
    return (
        reported,
        shared,
        limits,
        members,
        dict(traffic.sent_to),
        dict(traffic.received_from),
        totals,
    )


def topology(channel):
    """Of this machine, and what a group of ranks makes of it."""
    return Topology.gather(channel)


def policies_of_gloo_threads(channel):
    """Counts of a channel that was just opened, and after another one was opened."""
    before = gloo_threads()
    first = channel.ranks.open_channel()
    threads = gloo_threads() - before
    ours = [os.sched_getscheduler(thread) for thread in threads]
    for thread in threads:
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    second = channel.ranks.open_channel()
    chosen = [os.sched_getscheduler(thread) for thread in threads]
    second.close()
    first.close()
    return ours, chosen


def gloo_threads():
    results = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # one that has ended meanwhile
            if "gloo_tcp" in (task / "comm").read_text():
                results.add(int(task.name))
    return results


def sum_and_end(rank, port):
    """Sums, and the end of the interpreter.

    Gloo's threads have their turn when no other thread wants the processor.
    """
    places = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {places[rank % len(places)]})
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    channel = Ranks.joined().open_channel()
    for task in Path("/proc/self/task").iterdir():
        if "gloo" in (task / "comm").read_text():
            os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))
    for _ in range(8):
        channel.all_reduce(torch.ones(1000))()
    ctypes.pythonapi.Py_Exit(0)


def join_again(rank, port):
    """Join, sum and leave, three times; nothing of the time before is left.

    By one store, in which each time has a part: a store of its own would be open for a moment when
    the other rank already looks for the next one.
    """
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    for number in range(3):
        part = dist.PrefixStore(str(number), store)
        dist.init_process_group("gloo", store=part, rank=rank, world_size=2)
        channel = Ranks.joined().open_channel()
        total = torch.ones(5)
        channel.all_reduce(total)()
        assert total.tolist() == [2.0] * 5
        dist.barrier()
        del channel
        dist.destroy_process_group()
        gc.collect()
        deadline = time.monotonic() + 10.0
        while gloo_threads():
            assert (
                time.monotonic() < deadline
            )  # the system still shows a thread that has just been joined
