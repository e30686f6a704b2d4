"""Ten thousand references, shared around four workers and dropped: nothing may be left of them."""

import gc
import os
import random
import threading
import time

import pytest
import reference_cases as cases
import torch

from pibroch import rpc
from pibroch.rpc.options import DEFAULT_NUM_WORKER_THREADS
from pibroch.rpc.rref import RRef, remote

pytestmark = [pytest.mark.alone, pytest.mark.timeout(300)]  # alone: counts what is in /dev/shm

NUM_WORKERS = 4
NUM_REFERENCES = 10_000  # over all workers
BATCH = 250


def others(me):
    return [f"worker{rank}" for rank in range(NUM_WORKERS) if f"worker{rank}" != me]


def take_over(rrefs, hops):
    """Use one of them, keep some for a while, and hand all on."""
    value = rrefs[0].to_here()
    cases.kept.setdefault("some", []).extend(rrefs[::7])
    if not hops:
        return float(value.sum())
    me = rpc.get_worker_info().name
    return rpc.rpc_sync(random.choice(others(me)), take_over, (rrefs, hops - 1))


def ones():
    return torch.ones(4)


def share_around(num_references):
    """Make references here and elsewhere, pass them on in batches, drop them on the way."""
    me = rpc.get_worker_info().name
    futures = []
    for _ in range(0, num_references, BATCH):
        rrefs = [RRef(torch.ones(4)) for _ in range(BATCH // 2)]
        rrefs += [remote(to, ones) for to in random.choices(others(me), k=BATCH - len(rrefs))]
        random.shuffle(rrefs)
        futures.append(rpc.rpc_async(random.choice(others(me)), take_over, (rrefs, 2)))
        del rrefs
    return [future.wait() for future in futures]


_full = threading.Barrier(DEFAULT_NUM_WORKER_THREADS)


def rendezvous():
    _full.wait(120)


def use_all_threads():
    """Have all threads of the next worker's pool started."""
    to = (rpc.get_worker_info().id + 1) % NUM_WORKERS
    for future in [rpc.rpc_async(to, rendezvous) for _ in range(DEFAULT_NUM_WORKER_THREADS)]:
        future.wait()


def shared_memory():
    """Memory files of this process, and what has a name in /dev/shm."""
    files = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            files.append(os.readlink(f"/proc/self/fd/{fd}").partition(" ")[0])
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return sum("memfd" in file for file in files), len(os.listdir("/dev/shm"))


def resources():
    """Threads, descriptors and shared memory of this process."""
    gc.collect()
    memory_files, named = shared_memory()
    return {
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "memory_files": memory_files,
        "named": named,
    }


@pytest.mark.slow
def test_ten_thousand_references_leave_nothing(workers):
    team = workers(NUM_WORKERS)
    team.run_all(use_all_threads)
    team.run_all(share_around, NUM_REFERENCES // NUM_WORKERS // 5)  # warm: connections, buffers
    assert team.run_all(cases.settle) == [{}] * NUM_WORKERS
    before = team.run_all(resources)
    for sums in team.run_all(share_around, NUM_REFERENCES // NUM_WORKERS):
        assert sums == [4.0] * (NUM_REFERENCES // NUM_WORKERS // BATCH)
    # some are still held
    assert sum(counts["values"] for counts in team.run_all(cases.live_counts)) > 1000
    assert team.run_all(cases.settle) == [{}] * NUM_WORKERS
    deadline = time.monotonic() + cases.SETTLE_S
    while (
        left := [more_than(*pair) for pair in zip(before, team.run_all(resources), strict=True)]
    ) != [{}] * 4:
        assert time.monotonic() < deadline, left  # threads that have been told to end need a moment
        time.sleep(0.1)


def more_than(first, second):
    return {kind: second[kind] - first[kind] for kind in first if second[kind] > first[kind]}
