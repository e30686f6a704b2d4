"""Homes by greedy balance (OPER, Sec. 4.2) and copies by Algorithm 1 (Sec. 4.3).

P partitions, W shards. ``order`` lists partitions by falling bytes read for a byte of memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.policy import kernel
from pibroch.planner.kernels.placement.heap import drop_top, push, rise, sink

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Shards = NDArray[np.int16]


@kernel
def place(
    order: Ints,
    weight: Floats,
    memory: Floats,
    by_memory: Flags,
    room: Floats,
    load: Floats,
    used: Floats,
    home: Ints,
) -> int:
    """Give each partition of ``order`` a home.

    Access-bound ones the least loaded shard, memory-bound ones the emptiest.

    Among shards that are equally empty but for one partition, the least loaded is taken.

    Args:
        order: ``[n]``, partitions to place, in this order.
        weight: ``[P]``, what a partition adds to its shard's load.
        memory: ``[P]``, and to its memory.
        by_memory: ``[P]``, whether memory decides.
        room: ``[W]``, memory that a shard may use.
        load: ``[W]``, raised.
        used: ``[W]``, raised.
        home: ``[P]``, receives the shard.

    Returns:
        The number of partitions that fitted nowhere and lie on the emptiest shard all the same.
    """
    num_shards = len(room)
    misfits = 0
    level = used / room
    for place in range(len(order)):
        partition = order[place]
        size = memory[partition]
        best = -1
        emptiest = 0
        for shard in range(num_shards):
            if level[shard] < level[emptiest]:
                emptiest = shard
        for shard in range(num_shards):
            # the load first: most shards are not the least loaded, and need no closer look
            if best >= 0 and (
                load[shard] > load[best]
                or (load[shard] == load[best] and used[shard] >= used[best])
            ):
                continue
            if used[shard] + size > room[shard]:
                continue
            # within half a partition of the emptiest is as empty
            if by_memory[partition] and (level[shard] - level[emptiest]) * room[shard] > 0.5 * size:
                continue
            best = shard
        if best < 0:
            best = emptiest
            misfits += used[best] + size > room[best]
        home[partition] = best
        load[best] += weight[partition]
        used[best] += size
        level[best] = used[best] / room[best]
    return misfits


@kernel
def is_nearer(reader: int, shard: int, other: int, home: int, cost: Floats) -> bool:
    """Whether a reader that holds no copy reads from ``shard`` rather than from ``other``.

    See ``cost.sources``.
    """
    if cost[reader, shard] != cost[reader, other]:
        return bool(cost[reader, shard] < cost[reader, other])
    if shard == home or other == home:
        return bool(shard == home)
    num_shards = len(cost)
    return (shard - reader) % num_shards < (other - reader) % num_shards


class Nearer(NamedTuple):
    """The shards that cost a reader less than its dearest one, for each reader.

    Only these can be nearer to it than a home.

    Attributes:
        starts: int64 ``[W + 1]``, where each reader's shards begin.
        shards: int16, the cheapest first, of equals the next in cyclic order after the reader.
    """

    starts: Ints
    shards: Shards


@kernel
def nearer_shards(cost: Floats) -> Nearer:
    """Which shards are nearer than the dearest, by reader.

    O(W**2 log W), and the lists are short where hosts are.
    """
    num_shards = len(cost)
    starts = np.zeros(num_shards + 1, np.int64)
    dearest = np.zeros(num_shards)
    for reader in range(num_shards):
        for shard in range(num_shards):
            if shard != reader:
                dearest[reader] = max(dearest[reader], cost[reader, shard])
    for reader in range(num_shards):
        starts[reader + 1] = starts[reader]
        for shard in range(num_shards):
            if shard != reader:
                starts[reader + 1] += cost[reader, shard] < dearest[reader]
    shards = np.empty(starts[-1], np.int16)
    scratch = np.empty(num_shards, np.int16)
    prices = np.empty(num_shards)
    for reader in range(num_shards):
        count = 0
        for step in range(1, num_shards):
            shard = (reader + step) % num_shards
            if cost[reader, shard] < dearest[reader]:
                scratch[count] = shard
                prices[count] = cost[reader, shard]
                count += 1
        cheapest_first = np.argsort(prices[:count], kind="mergesort")
        for number in range(count):
            shards[starts[reader] + number] = scratch[cheapest_first[number]]
    return Nearer(starts, shards)


@kernel
def _seen_from_shards(nearer: Nearer) -> Nearer:
    """By shard the readers to which it is one of the nearer ones."""
    num_shards = len(nearer.starts) - 1
    starts = np.zeros(num_shards + 1, np.int64)
    for shard in nearer.shards:
        starts[shard + 1] += 1
    starts = np.cumsum(starts)
    readers = np.empty(len(nearer.shards), np.int16)
    ends = starts[:-1].copy()
    for reader in range(num_shards):
        for shard in nearer.shards[nearer.starts[reader] : nearer.starts[reader + 1]]:
            readers[ends[shard]] = reader
            ends[shard] += 1
    return Nearer(starts, readers)


@kernel
def find_sources(home: Ints, held: Flags, cost: Floats, nearer: Nearer, source: Shards) -> None:
    """Write from which shard each reads each partition to ``source`` ``[P, W]``.

    The rule is that of ``cost.sources``.
    """
    num_shards = len(cost)
    for partition in range(len(home)):
        at_home = home[partition]
        source[partition] = at_home
        if held[partition].sum() == 1:
            continue
        for reader in range(num_shards):
            if held[partition, reader]:
                source[partition, reader] = reader
                continue
            for shard in nearer.shards[nearer.starts[reader] : nearer.starts[reader + 1]]:
                if held[partition, shard]:
                    if cost[reader, shard] < cost[reader, at_home]:
                        source[partition, reader] = shard
                    break


@kernel
def add_traffic(weight: Floats, source: Shards, given: Floats) -> None:
    """Add what each shard (row) gives each reader (column) to ``given`` ``[W, W]``."""
    for partition in range(len(weight)):
        for reader in range(source.shape[1]):
            given[source[partition, reader], reader] += weight[partition]


@kernel
def add_memory(memory: Floats, held: Flags, used: Floats) -> None:
    """Add the bytes that holders need to ``used`` ``[W]``."""
    for partition in range(len(memory)):
        for shard in range(len(used)):
            used[shard] += memory[partition] * held[partition, shard]


@kernel
def copy_everywhere(chosen: Ints, memory: Floats, room: Floats, used: Floats, held: Flags) -> None:
    """Give every shard each of the chosen partitions, in their order, for which all have room."""
    num_shards = len(room)
    for partition in chosen:
        fits = True
        for shard in range(num_shards):
            more = memory[partition] * (not held[partition, shard])
            fits &= used[shard] + more <= room[shard]
        if fits:
            for shard in range(num_shards):
                used[shard] += memory[partition] * (not held[partition, shard])
                held[partition, shard] = True


class Offers(NamedTuple):
    """Where a reader looks for what relieves a link.

    Attributes:
        starts: int64 ``[W + 1]``, where the places of each home begin.
        places: int64 ``[P]``, places in ``order``, rising, home after home.
        is_near: bool ``[W, W]``, whether a reader may turn to a shard that is no home; then all
            places are looked at.
        pointer: int64 ``[W, W]``, before which nothing is left: a place, or for links that are not
            near one of ``places``.
    """

    starts: Ints
    places: Ints
    is_near: Flags
    pointer: Ints


@kernel
def _offers(order: Ints, weight: Floats, home: Ints, nearer: Nearer, num_shards: int) -> Offers:
    starts = np.zeros(num_shards + 1, np.int64)
    for partition in order:
        if weight[partition] > 0:
            starts[home[partition] + 1] += 1
    starts = np.cumsum(starts)
    places = np.empty(starts[-1], np.int64)
    ends = starts[:-1].copy()
    for place in range(len(order)):
        at_home = home[order[place]]
        if weight[order[place]] > 0:
            places[ends[at_home]] = place
            ends[at_home] += 1
    is_near = np.zeros((num_shards, num_shards), np.bool_)
    pointer = np.empty((num_shards, num_shards), np.int64)
    for reader in range(num_shards):
        pointer[reader] = starts[:-1]
        for shard in nearer.shards[nearer.starts[reader] : nearer.starts[reader + 1]]:
            is_near[reader, shard] = True
            pointer[reader, shard] = 0
    return Offers(starts, places, is_near, pointer)


@kernel
def _relief(
    reader: int,
    shard: int,
    order: Ints,
    weight: Floats,
    memory: Floats,
    free: float,
    source: Shards,
    offers: Offers,
) -> int:
    """The first place of what the reader gets from ``shard`` and has room for; -1 for none."""
    pointer = offers.pointer
    is_near = offers.is_near[reader, shard]
    end = len(order) if is_near else offers.starts[shard + 1]
    for at in range(pointer[reader, shard], end):
        place = at if is_near else offers.places[at]
        partition = order[place]
        # the source last: it is far away in memory, and few of the later ones fit
        if (
            memory[partition] <= free
            and weight[partition] > 0
            and source[partition, reader] == shard
        ):
            pointer[reader, shard] = at
            return int(place)
    pointer[reader, shard] = end
    return -1


@kernel
def replicate(
    order: Ints,
    weight: Floats,
    memory: Floats,
    home: Ints,
    cost: Floats,
    nearer: Nearer,
    available: Floats,
    held: Flags,
    source: Shards,
    link: Floats,
) -> int:
    """Algorithm 1: shard by shard, copy what relieves its worst link, until nothing more fits.

    Differs from the paper: a shard whose worst link offers nothing that fits goes on to its next
    worst, a shard is no link of its own, and among equally cheap holders readers follow
    ``cost.sources``. Worst links come from a heap for each reader, and what relieves one from the
    list of what lies at its other end, so the cost is O(P W + C (N + log W)) for C copies and N
    shards that are nearer to a reader than the dearest.

    Args:
        order: ``[P]``, the partitions that may be copied, by falling worth.
        weight: ``[P]``, bytes that one reader gets of a partition in a step.
        memory: ``[P]``, bytes of a copy.
        home: ``[P]``.
        cost: ``[W, W]`` of a byte that row i reads from column j.
        nearer: of these costs.
        available: ``[W]``, memory for copies; lowered.
        held: ``[P, W]``, which shards hold a partition; copies are added.
        source: ``[P, W]``, from which shard each reads; kept up to date.
        link: ``[W, W]``, cost of what i gets from j; kept up to date.

    Returns:
        The number of copies that were added.
    """
    num_shards = len(available)
    added = 0
    offers = _offers(order, weight, home, nearer, num_shards)
    worst_first = np.empty((num_shards, num_shards), np.int16)  # a heap of links for each reader
    place_of = np.full((num_shards, num_shards), np.int16(-1))
    num_links = np.zeros(num_shards, np.int64)
    freest_first = np.empty(num_shards, np.int16)
    rank_of = np.full(num_shards, np.int16(-1))
    num_readers = 0
    turning = _seen_from_shards(nearer)
    for reader in range(num_shards):
        num_readers = push(freest_first, num_readers, rank_of, available, reader)
        for shard in range(num_shards):
            if shard != reader:
                num_links[reader] = push(
                    worst_first[reader], num_links[reader], place_of[reader], link[reader], shard
                )
    while num_readers > 0:
        reader = freest_first[0]
        relief = -1
        while relief < 0 and num_links[reader] > 0:
            shard = worst_first[reader, 0]
            if link[reader, shard] <= 0:
                break
            relief = _relief(
                reader, shard, order, weight, memory, available[reader], source, offers
            )
            # nothing that fits: for good, unless the reader turns to this shard later
            if relief < 0:
                num_links[reader] = drop_top(
                    worst_first[reader], num_links[reader], place_of[reader], link[reader]
                )
        if relief < 0:  # nothing relieves it: for good, as its room only shrinks
            num_readers = drop_top(freest_first, num_readers, rank_of, available)
            continue
        partition = order[relief]
        added += 1
        available[reader] -= memory[partition]
        sink(freest_first, num_readers, rank_of, available, reader)
        held[partition, reader] = True
        shard = source[partition, reader]
        link[reader, shard] -= weight[partition] * cost[reader, shard]
        sink(worst_first[reader], num_links[reader], place_of[reader], link[reader], shard)
        source[partition, reader] = reader
        link[reader, reader] += weight[partition] * cost[reader, reader]
        for other in turning.shards[turning.starts[reader] : turning.starts[reader + 1]]:
            before = source[partition, other]
            if held[partition, other] or not is_nearer(
                other, reader, before, home[partition], cost
            ):
                continue
            links = link[other]
            heap = worst_first[other]
            place = place_of[other]
            links[before] -= weight[partition] * cost[other, before]
            if place[before] >= 0:
                sink(heap, num_links[other], place, links, before)
            links[reader] += weight[partition] * cost[other, reader]
            source[partition, other] = reader
            # this very place may relieve it now
            offers.pointer[other, reader] = min(offers.pointer[other, reader], relief)
            if place[reader] >= 0:
                rise(heap, place, links, reader)
            else:
                num_links[other] = push(heap, num_links[other], place, links, reader)
    return added
