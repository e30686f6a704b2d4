"""What each rank does in the tests of bounded lag's transports and of the backend over them."""

import itertools
import os
import random
import signal
import time
from pathlib import Path
from unittest import mock

import numpy as np
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from mpi_start import start_mpi
from pibroch.collectives.bounded_lag import losses
from pibroch.collectives.bounded_lag.base import Opening, RankParts, Slot
from pibroch.collectives.bounded_lag.opening import open_lagged_transport
from pibroch.collectives.bounded_lag.options import BoundedLagOptions
from pibroch.collectives.bounded_lag.window import Complete, LagWindow
from pibroch.errors import InputError, PibrochError, RankFailedError
from pibroch.host import this_machine
from pibroch.wire import rendezvous as rendezvous_module

SLOT_BYTES = 512
_numbers = itertools.count()


def store():
    """Of one transport alone; all ranks of a world ask for theirs in the same order."""
    return PrefixStore(f"lagged/{next(_numbers)}", _get_default_store())


def opened(channel, name, bound=1, num_streams=1, timeout_s=60.0):
    """``mixed`` are two hosts: the first rank is alone on one."""
    options = BoundedLagOptions(
        transport="auto" if name == "mixed" else name, slot_bytes=SLOT_BYTES
    )
    ranks = channel.ranks
    if name == "mpi":
        start_mpi(ranks)
    slots = LagWindow(bound).num_slots
    host = f"host {min(ranks.rank, 1)}" if name == "mixed" else this_machine()
    with mock.patch.object(
        rendezvous_module, "this_machine", lambda: host
    ):  # the process goes on to other tests
        return open_lagged_transport(
            Opening(store(), ranks.rank, ranks.members, slots, options, timeout_s, num_streams)
        )


def message(number, sender, receiver, seed):
    """A part of random size whose content says whose it is.

    Some are empty, some larger than a slot.
    """
    choices = random.Random(f"{seed} {number} {sender} {receiver}")
    size = choices.choice([0, 1, 8, 200, SLOT_BYTES, SLOT_BYTES + 1, choices.randrange(20_000)])
    return np.frombuffer(choices.randbytes(size), np.uint8)


def exchanges(channel, name, bound, num_exchanges, seed=0, most_delay_s=0.0005):
    """Requests under a window, each part compared with what was sent.

    Returns the bytes by which memory grew after the first tenth.
    """
    transport = opened(channel, name, bound)
    window = LagWindow(bound)
    here = channel.ranks.rank
    size = channel.ranks.world_size
    delays = random.Random(f"{seed} {here}")
    outstanding = {}
    grown = 0
    peers = [p for p in range(size) if p != here]

    def carry_out(instructions, going=None):
        for each in instructions:
            if isinstance(each, Complete):
                received = outstanding.pop(each.number)
                transport.take(Slot(0, each.number), RankParts.of(received))
                for p in peers:
                    assert received[p].tobytes() == message(each.number, p, here, seed).tobytes(), (
                        each,
                        p,
                    )
            else:
                transport.put(Slot(0, each.number), RankParts.of(going))

    for number in range(num_exchanges):
        if number == num_exchanges // 10:
            grown = -resident_bytes()
        if delays.random() < 0.1:
            time.sleep(delays.random() * most_delay_s)
        outstanding[number] = [
            np.empty(len(message(number, p, here, seed)) if p != here else 0, np.uint8)
            for p in range(size)
        ]
        carry_out(window.initiate(), [message(number, here, p, seed) for p in range(size)])
    carry_out(window.wait(num_exchanges - 1))
    grown += resident_bytes()
    channel.barrier()
    transport.close()
    return grown


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def views(channel, name):
    """Two streams, parts to one peer at a time, looked at where they lie."""
    transport = opened(channel, name, 2, num_streams=2)
    here = channel.ranks.rank
    size = channel.ranks.world_size
    seen = 0
    results = []
    for number, stream in itertools.product(range(9), range(2)):
        slot = Slot(stream, number)
        parts = [
            np.full(3 + 400 * (number % 4), 10 * here + p + stream, np.uint8) for p in range(size)
        ]
        for p in reversed(transport.peers):
            transport.put(slot, RankParts.of(parts), only=p)
        while not all(transport.has_arrived(slot, p) for p in transport.peers):
            seen = transport.wait_for_news(seen, slot)
        for p in transport.peers:
            view = transport.view(slot, p)
            results.append(
                (view == 10 * p + here + stream).all() and len(view) == 3 + 400 * (number % 4)
            )
        assert not any(
            transport.has_arrived(Slot(stream, number + 1), p) and number == 8
            for p in transport.peers
        )
    channel.barrier()
    transport.close()
    return all(results)


def wrong_size(channel, name):
    """Rank 0 expects more than comes."""
    transport = opened(channel, name)
    here = channel.ranks.rank
    transport.put(Slot(0, 0), RankParts.of([np.zeros(5, np.uint8)] * channel.ranks.world_size))
    channel.barrier()
    try:
        transport.take(
            Slot(0, 0),
            RankParts.of([np.zeros(5 + (here == 0), np.uint8)] * channel.ranks.world_size),
        )
        return None
    except InputError as error:
        return str(error)
    finally:
        channel.barrier()
        transport.close()


def idle(channel, name):
    """The share of a CPU that a rank takes while it waits for another one.

    The least of three waits.

    A machine that others use, too, makes any one of them look dear.
    """
    transport = opened(channel, name)
    here = channel.ranks.rank
    parts = RankParts.of([np.zeros(5, np.uint8)] * channel.ranks.world_size)
    transport.put(Slot(0, 0), parts)
    transport.take(Slot(0, 0), parts)  # compiles
    shares = []
    for number in range(1, 4):
        channel.barrier()
        if here == 1:
            time.sleep(0.7)
        transport.put(Slot(0, number), parts)
        used = time.process_time()
        start = time.perf_counter()
        transport.take(Slot(0, number), parts)
        shares.append((time.process_time() - used) / (time.perf_counter() - start))
    channel.barrier()
    transport.close()
    return min(shares)


def close(channel, name):
    """Descriptors and threads before, with, and after a transport."""
    channel.barrier()
    before = files_and_threads()
    transport = opened(channel, name)
    parts = RankParts.of([np.zeros(5000, np.uint8)] * channel.ranks.world_size)
    transport.put(Slot(0, 0), parts)
    transport.take(Slot(0, 0), parts)
    channel.barrier()
    transport.close()
    transport.close()
    del transport
    deadline = time.monotonic() + 10
    while (after := files_and_threads()) != before and time.monotonic() < deadline:
        pass  # the system still shows a thread that has just been joined
    return before, after


def files_and_threads():
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def stop_before_sending(channel, name):
    """Rank 1 stops; its message comes when somebody lets it go on. The parts that arrived."""
    transport = opened(channel, name)
    here = channel.ranks.rank
    received = [np.zeros(1, np.uint8) for _ in range(2)]
    channel.barrier()
    if here == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    transport.put(Slot(0, 0), RankParts.of([np.ones(1, np.uint8)] * 2))
    transport.take(Slot(0, 0), RankParts.of(received))
    channel.barrier()
    transport.close()
    return received[1 - here].tolist()


def lose_a_peer(channel, name, victim, how, stopped_s):
    """One rank ends, or stops, while the others wait.

    The one that is named, why, and seconds until it was. Who is stopped for ``stopped_s`` is given
    up.

    Rank 0 waits for all; the others, which do not, wait for rank 0, and so in vain once it has
    given up.
    """
    losses.STOPPED_S = stopped_s
    transport = opened(channel, name)
    here = channel.ranks.rank
    parts = RankParts.of([np.zeros(5, np.uint8)] * channel.ranks.world_size)
    transport.put(Slot(0, 0), parts)
    transport.take(Slot(0, 0), parts)
    channel.barrier()  # so that nobody still waits for what the victim has sent
    start = time.monotonic()
    if here == victim:
        os.kill(os.getpid(), signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
    try:
        if here != 0:
            transport.put(Slot(0, 1), parts)
        transport.take(Slot(0, 1), parts)
        return None
    except RankFailedError as error:
        return error.rank, str(error), time.monotonic() - start


def wait_in_vain(channel, name):
    """The error when a rank lives and sends nothing."""
    transport = opened(channel, name, timeout_s=0.5)
    here = channel.ranks.rank
    parts = RankParts.of([np.zeros(5, np.uint8)] * channel.ranks.world_size)
    text = None
    if here == 0:
        try:
            transport.take(Slot(0, 0), parts)
        except PibrochError as error:
            text = str(error)
    channel.barrier()
    transport.close()
    return text
