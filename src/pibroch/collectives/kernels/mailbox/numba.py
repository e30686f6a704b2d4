"""Messages that processes leave for each other in memory of their own that the others map.

A queue is a list of slots of 64 bytes: a slot says where its message lies and which slot is the
next one, which its writer has prepared by then. The first word is stored last and with release
order: who sees it set sees all of the message. The reader counts what it took; that far slots and
messages may be used again.
"""

from __future__ import annotations

from pibroch.collectives.kernels.atomics import add, load, store
from pibroch.collectives.kernels.ring.numba import copy_bytes, wake_sleepers
from pibroch.kernels.arrays import Ints
from pibroch.kernels.policy import kernel

IS_THERE = 0
NBYTES = 8
PLACE = 16
NEXT = 24
SLOT_BYTES = 64
"""Words of a slot: whether it is written, its message's size and place, and the next slot.

Place and slot are offsets in the writer's segment.
"""


@kernel
def prepare(slot: int) -> None:
    """Let a slot at an address be one that is not written."""
    store(slot + IS_THERE, 0)


@kernel
def leave(
    base: int, slot: int, following: int, place: int, source: int, nbytes: int, futex: int
) -> None:
    """Write a message and its slot, and wake its reader.

    Args:
        base: address of the writer's segment, in which the next three lie.
        slot: which the reader looks at.
        following: which it looks at next.
        place: of the message; 0 for one that comes by another way.
        source: address that it is copied from.
        nbytes: its size.
        futex: of the reader.
    """
    if place != 0:
        copy_bytes(base + place, source, nbytes)
    prepare(base + following)
    store(base + slot + NBYTES, nbytes)
    store(base + slot + PLACE, place)
    store(base + slot + NEXT, following)
    store(base + slot + IS_THERE, 1)
    wake_sleepers(futex)


@kernel
def look(slot: int, head: Ints) -> bool:
    """Whether a slot at an address is written.

    If it is, ``head`` int64 ``[3]`` gets NBYTES, PLACE and NEXT.
    """
    if load(slot + IS_THERE) == 0:
        return False
    head[0] = load(slot + NBYTES)
    head[1] = load(slot + PLACE)
    head[2] = load(slot + NEXT)
    return True


@kernel
def take(target: int, source: int, nbytes: int, counter: int, subscribers: int, futex: int) -> None:
    """Copy a message out of the writer's segment and count it there; see :func:`count`."""
    copy_bytes(target, source, nbytes)
    count(counter, subscribers, futex)


@kernel
def count(counter: int, subscribers: int, futex: int) -> None:
    """Add one to a word of another process, and wake that if it has subscribed to such."""
    add(counter, 1)
    if load(subscribers) != 0:
        wake_sleepers(futex)


@kernel
def change(word: int, by: int) -> None:
    """Add to a word, as a full barrier.

    A reader that subscribes and then looks at counters misses nothing.
    """
    add(word, by)


@kernel
def shown(word: int) -> int:
    """What a word shows."""
    return load(word)
