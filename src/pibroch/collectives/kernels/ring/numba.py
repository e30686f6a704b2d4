"""Put messages into slots of other processes' memory, and take those that came out of one's own.

A slot is a header of 64 bytes and room behind it. The header's first word is the message's number
plus one, stored last and with release order: whoever loads it sees all of the message. A message
that does not fit lies in a segment, whose id is in the header. A process that sleeps waits on its
*futex*, a word that changes with each message put there.

Shape legend: W processes, this one included; rows of ``links`` that are zero stand for processes
that are not reached here.
"""

from __future__ import annotations

import numpy as np

from pibroch.collectives.kernels.atomics import (
    LINE_BYTES,
    add,
    copy,
    fence,
    give_way,
    load,
    nanoseconds,
    pause,
    sleep_on,
    store,
    stream_line_at,
    wake,
)
from pibroch.kernels.arrays import Ints
from pibroch.kernels.policy import kernel

WRITE = 0
READ = 1
FUTEX = 2
"""Columns of ``links`` int64 ``[W, 3]``.

Addresses of the ring that this process writes to, the one it reads, the other's futex word.
"""
SEQUENCE = 0
NBYTES = 8
SEGMENT = 16
HEADER_BYTES = 64
SLEEPERS = 64
"""Offset behind a futex word: how many sleep on it."""
ARRIVED = 0
PENDING = 1
OVERWRITTEN = 2
OTHER_SIZE = 3
UNKNOWN_SEGMENT = 4
SPINS = 0
YIELDS = 1
MOST_SPINS = 2
CALM = 3
PENALTY = 4
"""Places in ``effort`` int64 ``[5]``.

Turns in which a wait looks again at once, then gives way, before it sleeps; and more.

A wait that ends while it spins doubles the first, up to the third; any other halves it: the rank
that is waited for may want this very core. A turn that gave way for longer than LONG_NS gave the
core to a stranger, who keeps it for a time slice; who sleeps gets it back at once when he is woken.
So the next ``CALM`` waits do not give way: ``PENALTY`` of them, which doubles each time and goes
down by one with each wait that could have given way.
"""
LEAST_PENALTY = 32
MOST_PENALTY = 512
STREAMED_BYTES = 2 << 20
LONG_NS = 100_000


@kernel
def copy_bytes(target: int, source: int, nbytes: int) -> None:
    """Copy between addresses of memory that does not overlap.

    Past the caches where these would not hold it anyway.

    An ordinary store first reads the line that it is about to overwrite: a third of a copy's
    traffic with memory.
    """
    if nbytes < STREAMED_BYTES:
        copy(target, source, nbytes)
        return
    # streaming stores need whole, aligned lines of the target; the source may begin anywhere
    head = -target % LINE_BYTES
    copy(target, source, head)
    end = head + (nbytes - head) // LINE_BYTES * LINE_BYTES
    for place in range(head, end, LINE_BYTES):
        stream_line_at(target + place, source + place)
    copy(target + end, source + end, nbytes - end)
    fence()


@kernel
def wake_sleepers(futex: int) -> None:
    """Change a futex word and wake who sleeps on it; without a sleeper no system call."""
    # a full barrier: a sleeper is either seen here, or sees the word before it sleeps
    add(futex, 1)
    if load(futex + SLEEPERS) != 0:
        wake(futex)


@kernel
def put_one(
    link: Ints, place: int, sequence: int, address: int, nbytes: int, segment: Ints
) -> None:
    """One message to one process; see :func:`put`."""
    slot = link[WRITE] + place
    if segment[0] == 0:
        copy_bytes(slot + HEADER_BYTES, address, nbytes)
    else:
        copy_bytes(segment[1], address, nbytes)
    # the number last: who sees it sees the rest, and the part, too
    store(slot + NBYTES, nbytes)
    store(slot + SEGMENT, segment[0])
    store(slot + SEQUENCE, sequence)
    wake_sleepers(link[FUTEX])


@kernel
def put(
    links: Ints,
    me: int,
    place: int,
    sequence: int,
    addresses: Ints,
    sizes: Ints,
    segments: Ints,
    own: int,
) -> None:
    """Put a message into one slot of each process.

    Args:
        links: see :data:`WRITE`.
        me: row of this process.
        place: of the slot, from the beginning of each ring.
        sequence: number of the message plus one.
        addresses: int64 ``[W]``, of what goes to each.
        sizes: int64 ``[W]``, bytes.
        segments: int64 ``[W, 2]``, id and address of the segment for each, zero where a slot will
            do.
        own: where this process's own part goes; 0 for nowhere.
    """
    size = len(links)
    for step in range(1, size):
        # each begins with its neighbour: nobody is written to by all at once
        p = (me + step) % size
        if links[p, WRITE] != 0:
            put_one(links[p], place, sequence, addresses[p], sizes[p], segments[p])
    if own != 0:
        copy_bytes(own, addresses[me], sizes[me])


@kernel
def put_equal(
    links: Ints,
    me: int,
    place: int,
    sequence: int,
    source: int,
    target: int,
    nbytes: int,
    addresses: Ints,
    sizes: Ints,
) -> None:
    """:func:`put` equal parts that fit a slot, and prepare what :func:`take` needs.

    Args:
        links: as there.
        me: as there.
        place: as there.
        sequence: as there.
        source: address of W parts in rank order.
        target: where those that come will go; this process's own one at once.
        nbytes: of each part.
        addresses: int64 ``[W]``, filled here: the places of the parts that come.
        sizes: int64 ``[W]``, filled here.
    """
    size = len(links)
    nothing = np.zeros(2, np.int64)
    for p in range(size):
        addresses[p] = target + p * nbytes
        sizes[p] = nbytes
    for step in range(1, size):
        p = (me + step) % size
        put_one(links[p], place, sequence, source + p * nbytes, nbytes, nothing)
    copy_bytes(target + me * nbytes, source + me * nbytes, nbytes)


@kernel
def has_arrived(links: Ints, p: int, place: int, sequence: int) -> bool:
    """Whether a message of one process is there."""
    return load(links[p, READ] + place + SEQUENCE) >= sequence


@kernel
def _any_has_arrived(links: Ints, place: int, sequence: int, pending: Ints) -> bool:
    has_any = False
    for p in range(len(links)):
        if pending[p] != 0:
            has_any |= load(links[p, READ] + place + SEQUENCE) >= sequence
    return has_any


@kernel
def _take_one(slot: int, p: int, addresses: Ints, sizes: Ints, segments: Ints) -> int:
    """Copy a message that is there; says what is wrong with it otherwise."""
    nbytes = load(slot + NBYTES)
    if nbytes != sizes[p]:
        return OTHER_SIZE
    segment = load(slot + SEGMENT)
    source = slot + HEADER_BYTES
    if segment != 0:
        # only Python can map a segment; it comes back with the address
        if segments[p, 0] != segment:
            return UNKNOWN_SEGMENT
        source = segments[p, 1]
    copy_bytes(addresses[p], source, nbytes)
    return ARRIVED


@kernel
def _bide(effort: Ints, turn: int) -> bool:
    """What a turn of a wait does but look: spin or give way; false when it is time to sleep."""
    if turn < effort[SPINS]:
        pause()
        return True
    if effort[CALM] > 0 or turn >= effort[SPINS] + effort[YIELDS]:
        return False
    before = nanoseconds()
    give_way()
    if nanoseconds() - before > LONG_NS:
        # a stranger had the core for a time slice: sleeping is cheaper for a while
        effort[CALM] = effort[PENALTY]
        effort[PENALTY] = min(2 * effort[PENALTY], MOST_PENALTY)
    return True


@kernel
def _learn(effort: Ints, turns: int) -> None:
    """From a wait of so many turns."""
    if turns < effort[SPINS]:
        effort[SPINS] = min(2 * effort[SPINS], effort[MOST_SPINS])
    else:
        # never to nothing, or no wait could end while it spins, and the effort never grow again
        effort[SPINS] = max(effort[SPINS] // 2, effort[MOST_SPINS] // 5)
    if effort[CALM] > 0:
        effort[CALM] -= 1
    else:
        effort[PENALTY] = max(effort[PENALTY] - 1, LEAST_PENALTY)


@kernel
def take(
    links: Ints,
    futex: int,
    place: int,
    sequence: int,
    addresses: Ints,
    sizes: Ints,
    segments: Ints,
    pending: Ints,
    effort: Ints,
    sleep_us: int,
) -> int:
    """Wait for the messages of all ``pending`` processes and copy each as it arrives.

    Args:
        links: as for :func:`put`.
        futex: of this process.
        place: as for :func:`put`.
        sequence: as there.
        addresses: int64 ``[W]``, where what comes goes.
        sizes: int64 ``[W]``, bytes that are expected of each.
        segments: int64 ``[W, 2]``, id and address of the segment that each last named in this slot.
        pending: int64 ``[W]``, of what has not been taken; set to 0 one by one.
        effort: see :data:`SPINS`; changed.
        sleep_us: the longest sleep, after which this returns.

    Returns:
        ARRIVED when all are taken, PENDING when some are not after the sleep; a message that is
        newer, of another size or in an unknown segment is reported, it is that of the first process
        that is still pending and whose slot is filled.
    """
    turns: int = 0
    while True:
        left = 0
        for p in range(len(links)):
            if pending[p] == 0:
                continue
            slot = links[p, READ] + place
            seen = load(slot + SEQUENCE)
            if seen < sequence:
                left += 1
            elif seen > sequence:
                # its sender is further ahead than the bound allows: the ranks do not agree
                return OVERWRITTEN
            else:
                outcome: int = _take_one(slot, p, addresses, sizes, segments)
                if outcome != ARRIVED:
                    return outcome
                pending[p] = 0
        if left == 0:
            _learn(effort, turns)
            return ARRIVED
        turns += 1
        if not _bide(effort, turns):
            # count as a sleeper first, look once more, then sleep: what arrives in between wakes
            # this process, or is seen
            add(futex + SLEEPERS, 1)
            value = load(futex)
            has_arrival = _any_has_arrived(links, place, sequence, pending)
            if not has_arrival:
                sleep_on(futex, value, sleep_us)
            add(futex + SLEEPERS, -1)
            if (
                not has_arrival
                and not _any_has_arrived(links, place, sequence, pending)
                and load(futex) == value
            ):
                return PENDING


@kernel
def wait_for_change(futex: int, seen: int, effort: Ints, sleep_us: int) -> int:
    """Wait until a futex word differs from ``seen``, not longer than one sleep.

    Returns what it shows.

    Args:
        futex: of this process.
        seen: what it showed before.
        effort: as for :func:`take`.
        sleep_us: the longest sleep.
    """
    turns: int = 1
    while _bide(effort, turns):
        if load(futex) != seen:
            _learn(effort, turns)
            return load(futex)
        turns += 1
    add(futex + SLEEPERS, 1)
    sleep_on(futex, seen, sleep_us)
    add(futex + SLEEPERS, -1)
    return load(futex)


@kernel
def exchange(
    links: Ints,
    futex: int,
    me: int,
    place: int,
    sequence: int,
    source: int,
    target: int,
    nbytes: int,
    pending: Ints,
    effort: Ints,
    sleep_us: int,
) -> int:
    """:func:`put_equal` and :func:`take` in one call.

    ``nbytes`` for and from each of W.

    Args:
        links: as there.
        futex: as there.
        me: as there.
        place: as there.
        sequence: as there.
        source: address of W parts in rank order.
        target: where those that come go.
        nbytes: of each part.
        pending: int64 ``[W]``, filled here.
        effort: as there.
        sleep_us: as there.
    """
    size = len(links)
    addresses = np.empty(size, np.int64)
    sizes = np.empty(size, np.int64)
    nothing = np.zeros((size, 2), np.int64)
    for p in range(size):
        pending[p] = 1 if p != me else 0
    put_equal(links, me, place, sequence, source, target, nbytes, addresses, sizes)
    return take(links, futex, place, sequence, addresses, sizes, nothing, pending, effort, sleep_us)
