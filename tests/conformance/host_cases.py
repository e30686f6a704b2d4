"""What each rank does in the tests of channels over shared memory."""

import os
import signal
import time
from contextlib import suppress

import torch

from pibroch.collectives import mailbox, transports

LARGE_ROWS = (mailbox.LARGEST_BYTES >> 3) - 1
PAST_ROOM = mailbox.ROOM_BYTES // mailbox.LARGEST_BYTES + 2
"""Messages of the largest size, of which the last ones find no room."""


def opened(channel):
    return transports.open_host_transport(channel.ranks)


def to_second(transport, ranks, tensor):
    """One message from rank 0 to rank 1; the wait and what comes."""
    nothing = torch.empty(0, dtype=tensor.dtype)
    if ranks.rank == 0:
        return transport.post([nothing, tensor], [nothing] * 2), None
    received = torch.zeros_like(tensor)
    return transport.post([nothing] * 2, [received, nothing]), received


def past_the_room(channel, expects_first):
    """More than there is room for, with one beyond all sizes between.

    The receiver waits only when the sender has finished.
    """
    transport = opened(channel)
    ranks = channel.ranks
    if ranks.rank == 0 and expects_first:
        channel.barrier()
    messages = [to_second(transport, ranks, torch.arange(LARGE_ROWS) + i) for i in range(PAST_ROOM)]
    messages.append(to_second(transport, ranks, torch.arange(LARGE_ROWS + 2)))
    messages.append(to_second(transport, ranks, torch.arange(3)))
    if ranks.rank == 1 and expects_first:
        channel.barrier()
    if ranks.rank == 0 or not expects_first:
        for wait, _ in messages:
            wait()
    if expects_first:
        channel.barrier()
        if ranks.rank == 1:
            for wait, _ in reversed(messages):
                wait()
    wanted = [torch.arange(LARGE_ROWS) + i for i in range(PAST_ROOM)] + [
        torch.arange(LARGE_ROWS + 2),
        torch.arange(3),
    ]
    is_right = ranks.rank == 0 or all(
        torch.equal(received, want) for (_, received), want in zip(messages, wanted, strict=True)
    )
    deferred = sum(map(len, transport._going.values()))
    channel.barrier()
    transport.close()
    return is_right, deferred


def few_slots(channel, num_slots, num_messages):
    """More messages under way than there are slots for; none is waited for before all were sent."""
    kept = mailbox.Mailbox.__init__.__defaults__
    mailbox.Mailbox.__init__.__defaults__ = (num_slots,)
    transport = opened(channel)
    ranks = channel.ranks
    mailbox.Mailbox.__init__.__defaults__ = kept
    pairs = []
    for i in range(num_messages):
        going = [
            torch.full((p + 1,), 100 * i + 10 * ranks.rank + p) for p in range(ranks.world_size)
        ]
        coming = [torch.zeros(ranks.rank + 1, dtype=torch.int64) for _ in going]
        pairs.append((transport.post(going, coming), coming))
    for wait, _ in reversed(pairs):
        wait()
    transport.close()
    return all(
        (received == 100 * i + 10 * p + ranks.rank).all()
        for i, (_, coming) in enumerate(pairs)
        for p, received in enumerate(coming)
        if p != ranks.rank
    )


def mixed(channel):
    """The last rank shares no memory; who reaches whom by it, and what came."""
    ranks = channel.ranks
    if ranks.rank == ranks.world_size - 1:
        os.environ[transports.TRANSPORT_VARIABLE] = "gloo"
    transport = opened(channel)
    os.environ.pop(transports.TRANSPORT_VARIABLE, None)
    received = [torch.zeros(70_000) for _ in range(ranks.world_size)]
    transport.post(
        [torch.full((70_000,), 10.0 * ranks.rank + p) for p in range(ranks.world_size)], received
    )()
    near = sorted(getattr(transport, "_coming", ()))
    transport.close()
    return near, [each.unique().tolist() for p, each in enumerate(received) if p != ranks.rank]


def other_sizes(channel):
    transport = opened(channel)
    ranks = channel.ranks
    message = None
    try:
        if ranks.rank == 0:
            transport.post([torch.empty(0), torch.ones(5)], [torch.empty(0)] * 2)()
        else:
            transport.post([torch.empty(0)] * 2, [torch.ones(6), torch.empty(0)])()
    except RuntimeError as error:
        message = str(error)
    channel.barrier()
    transport.close()
    return message


def late(channel):
    """Rank 0 waits for rank 1, which lives and sends nothing.

    Returns its error and the CPU time that it takes.
    """
    transport = transports.open_host_transport(channel.ranks.patient(0.5))
    message = None
    used = time.process_time()
    if channel.ranks.rank == 0:
        with suppress(RuntimeError):
            to_second(transport, channel.ranks, torch.ones(1))[0]()
        try:
            transport.post([torch.empty(0)] * 2, [torch.empty(0), torch.ones(1)])()
        except RuntimeError as error:
            message = str(error)
    used = time.process_time() - used
    channel.barrier()
    transport.close()
    return message, used


def stop_before_sending(channel):
    """Rank 1 stops; its message comes when somebody lets it go on.

    Returns what arrived, and after how many seconds.
    """
    transport = opened(channel)
    ranks = channel.ranks
    channel.barrier()
    start = time.monotonic()
    received = torch.zeros(3)
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        transport.post([torch.ones(3), torch.empty(0)], [torch.empty(0)] * 2)()
    else:
        transport.post([torch.empty(0)] * 2, [torch.empty(0), received])()
    seconds = time.monotonic() - start
    transport.close()
    return received.tolist(), seconds


def several_threads(channel, num_threads, num_messages):
    """A thread a channel, all at once, in several groups; sums of what came."""
    from concurrent.futures import ThreadPoolExecutor

    run = channel.ranks
    os.environ[transports.TRANSPORT_VARIABLE] = "auto"
    groups = [run, run.groups([[0, 1], [2]]), run]
    opened_channels = [group.open_channel() if group.world_size > 1 else None for group in groups]

    del os.environ[transports.TRANSPORT_VARIABLE]

    def work(own):
        total = 0
        for i in range(num_messages):
            size = own.ranks.world_size
            total += int(
                own.all_to_all(
                    torch.full((size, 1 + i), own.ranks.rank + i), [1] * size, [1] * size
                ).sum()
            )
        return total

    with ThreadPoolExecutor(num_threads) as pool:
        result = list(pool.map(lambda own: own and work(own), opened_channels))
    for each in opened_channels:
        if each is not None:
            each.close()
    return result


def kinds(channel):
    """What carries the messages of channels opened by default, with ``auto`` and with ``gloo``."""
    results = []
    for choice in ("", "auto", "gloo"):
        os.environ[transports.TRANSPORT_VARIABLE] = choice
        made = channel.ranks.open_channel()
        results.append(type(made._transport).__name__)
        made.close()
    del os.environ[transports.TRANSPORT_VARIABLE]
    return results
