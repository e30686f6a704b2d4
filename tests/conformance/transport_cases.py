"""What each rank does in the tests of transports."""

import os
import runpy
import time
from pathlib import Path

import torch

from pibroch.collectives.transports import TRANSPORTS

runpy.run_path(
    str(Path(__file__).parents[2] / "examples" / "own_transport.py")
)  # registers its own: "store"
DTYPES = (torch.float32, torch.int64, torch.uint8, torch.bfloat16)
LARGE = 300_000
SECONDS_TO_END = 10.0


def rows_from_to(sender, receiver):
    return (3 * sender + receiver) % 4


def pairs(transport, ranks, dtype=torch.int64, message=0):
    """Rank s sends rows of the value ``100 m + 10 s + p`` to rank p.

    Returns the wait and what comes, which is 7 before.
    """
    here = ranks.rank
    size = ranks.world_size
    going = [
        torch.full((rows_from_to(here, p), 2), 100 * message + 10 * here + p).to(dtype)
        for p in range(size)
    ]
    coming = [torch.full((rows_from_to(p, here), 2), 7).to(dtype) for p in range(size)]
    return transport.post(going, coming), coming


def exchange(channel, name, num_messages):
    """Messages of every type, all under way at once and waited for from the last to the first."""
    transport = TRANSPORTS[name](channel.ranks)
    results = []
    for dtype in DTYPES:
        waits, received = zip(
            *(pairs(transport, channel.ranks, dtype, m) for m in range(num_messages)), strict=True
        )
        for wait in reversed(waits):
            wait()
        results.append(received)
    transport.close()
    return results


def large(channel, name):
    """More than the system's buffers hold, both ways at once; ranks come at different times."""
    transport = TRANSPORTS[name](channel.ranks)
    ranks = channel.ranks
    going = [torch.full((LARGE,), float(10 * ranks.rank + p)) for p in range(ranks.world_size)]
    coming = [torch.empty(LARGE) for _ in going]
    for late in range(ranks.world_size):
        if ranks.rank == late:
            channel.gather_tensors(torch.empty(0))
            transport.post(going, coming)()
        else:
            wait = transport.post(going, coming)
            channel.gather_tensors(torch.empty(0))
            wait()
    transport.close()
    return [each.unique().tolist() for p, each in enumerate(coming) if p != ranks.rank]


def reduce(channel, name):
    transport = TRANSPORTS[name](channel.ranks)
    rank = channel.ranks.rank
    generator = torch.Generator().manual_seed(rank)
    tensors = [
        torch.randn(1000, generator=generator),
        torch.arange(5) + rank,
        torch.zeros(0),
        torch.ones(3).double(),
    ]
    for wait in [transport.reduce(tensor) for tensor in tensors]:
        wait()
    transport.close()
    return tensors


def groups(channel, name, partition):
    """Pairs and a sum inside the group of each rank, in the group's order.

    Who is in none has nothing to do.
    """
    group = channel.ranks.groups(partition)
    if group is None or group.world_size == 1:
        return group and (group.rank, group.members)
    transport = TRANSPORTS[name](group)
    wait, received = pairs(transport, group)
    wait()
    total = torch.tensor([2.0**channel.ranks.rank])
    transport.reduce(total)()
    transport.close()
    return group.rank, group.members, received, total.item()


def close(channel, name):
    """Threads and sockets, before a transport was opened, with it, and after it was closed.

    Also the error of a closed one.
    """
    channel.barrier()
    before = threads_and_sockets()
    transport = TRANSPORTS[name](channel.ranks)
    pairs(transport, channel.ranks)[0]()
    for _ in range(3):
        transport.reduce(torch.ones(100))()
    opened = threads_and_sockets()
    channel.barrier()
    transport.close()
    transport.close()
    deadline = time.monotonic() + SECONDS_TO_END
    while (after := threads_and_sockets()) != before and time.monotonic() < deadline:
        pass  # the system still shows a thread that has just been joined
    messages = []
    for call in (lambda: pairs(transport, channel.ranks), lambda: transport.reduce(torch.ones(1))):
        try:
            call()
        except RuntimeError as error:
            messages.append(str(error))
    return before, opened, after, messages


def threads_and_sockets():
    files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return len(os.listdir("/proc/self/task")), sum(name.startswith("socket:") for name in files)


def lose_a_peer(channel, name, victim, what):
    """One rank ends while the others wait for it; the error, and seconds until it came."""
    transport = TRANSPORTS[name](channel.ranks)
    ranks = channel.ranks
    pairs(transport, ranks)[0]()
    if ranks.rank == victim:
        os._exit(9)
    start = time.monotonic()
    try:
        if what == "reduce":
            transport.reduce(torch.ones(LARGE))()
        else:
            coming = [torch.empty(LARGE if p == victim else 0) for p in range(ranks.world_size)]
            transport.post([torch.empty(0)] * ranks.world_size, coming)()
        message = None
    except RuntimeError as error:
        message = str(error)
    transport.close()
    return message, time.monotonic() - start
