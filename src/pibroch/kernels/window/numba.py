"""The lookahead oracle's bookkeeping: who touches which row when, where its record is, and what must travel.

A **touch** is a row in a step. Touches are numbered from 1 in the order of their steps and lie in a ring; each knows the row's
next touch. All ranks keep the same touches; only ``place`` is a rank's own. Costs a few nanoseconds a touch, whatever the
length of the window.

N rows (addresses), C touches in the ring (a power of two), W ranks that train, and servers beyond them that hold homes and
read nothing: ranks 0 to W - 1 and W to P - 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.memory import prefetch
from pibroch.kernels.policy import kernel

HOME = -1  # holder of a record that is at its home
AGAIN, ARRIVED, FROM_HOME = 1, 2, 4  # flags of a touch, see Window
LRPP, PARTITIONED, REPLICATED = 0, 1, 2
EARLY, ALL = 0, 1
CRITICAL, DEFERRED, ALONE = 0, 1, 2
NEVER = 1 << 62
AHEAD = 12  # rows between the one that is entered and the one whose last touch is fetched

Ints = NDArray[np.int64]


class Window(NamedTuple):
    """Touches in a ring; touch n has the index ``n & (C - 1)``.

    Attributes:
        newest: int64 ``[N]``, the number of each row's last touch, 0 for none; it may have left the ring.
        row: address.
        readers: bit r for rank r.
        ahead: how much higher the number of the row's next touch is, 0 for none.
        holder: the rank whose slot has the record until the step before, or ``HOME``.
        owner: the rank that updates the row in the step, once it has arrived.
        place: where this rank reads, or updates, the row in the step; -1 where it does neither.
        flags: ``AGAIN``: the step before touches the row too; ``ARRIVED``: the row is where it is read; ``FROM_HOME``: it was
            at home before.
    """

    newest: Ints
    row: NDArray[Any]
    readers: NDArray[Any]
    ahead: NDArray[np.int32]
    holder: NDArray[np.int8]
    owner: NDArray[np.int8]
    place: NDArray[np.int32]
    flags: NDArray[np.uint8]


class Site(NamedTuple):
    """What the rules depend on besides the window.

    Attributes:
        bounds: int64 ``[P + 1]``, first address of each home.
        rank: whose view is wanted.
        design: ``LRPP``, ``PARTITIONED`` or ``REPLICATED``.
        num_home: places below it are rows of this rank's home.
        num_trainers: W.
    """

    bounds: Ints
    rank: int
    design: int
    num_home: int
    num_trainers: int


class Slots(NamedTuple):
    """Places for what is not at home here: a stack of free ones, and how many every rank has in use.

    Attributes:
        free: int32, a stack.
        depth: int64 ``[1]``, free places on the stack.
        used: int64 ``[P]``.
    """

    free: NDArray[np.int32]
    depth: Ints
    used: Ints


class Travel(NamedTuple):
    """Rows that travel; everything is grouped by the other rank, in the order of the touches.

    Attributes:
        records_out, weights_out: int64 places here of records that leave for good, and of weights that are lent.
        records_in, weights_in: int64 places here for those that come.
        counts: int64 ``[4, P]``, how many of these four to or from each rank.
        rows_in, lent_in: addresses of ``records_in`` and ``weights_in``.
    """

    records_out: Ints
    weights_out: Ints
    records_in: Ints
    weights_in: Ints
    counts: Ints
    rows_in: Ints
    lent_in: Ints


class Gradients(NamedTuple):
    """Gradients that travel, and the updates made of them.

    Attributes:
        given: int64, positions among this rank's sums of gradients that leave, grouped by owner.
        counts: int64 ``[2, P]``, how many go to, and how many come from each rank.
        places: int64 ``[U]``, places of the records to update here.
        segments: int32 ``[U + 1]``.
        source: int32: the contributions to row u are ``source[segments[u]:segments[u + 1]]``, in rank order: numbers of this
            rank's own sums, or of received gradients, which follow these.
    """

    given: Ints
    counts: Ints
    places: Ints
    segments: NDArray[np.int32]
    source: NDArray[np.int32]


@kernel
def enter(window: Window, rows: NDArray[Any], reader: int, first: Ints, last: int, numbers: Ints) -> int:
    """Note that ``reader`` touches ``rows`` (duplicates allowed) in the newest step; returns the number of the next touch.

    Args:
        window: has room for as many touches.
        rows: addresses.
        reader: rank.
        first: int64 ``[3]``, first touch of all steps not yet settled, of the step before the newest, and of the newest.
        last: number of the next touch.
        numbers: int64 ``[len(rows)]``, receives the numbers of the touches.
    """
    mask, oldest, before, newest = len(window.row) - 1, first[0], first[1], first[2]
    bit, final = np.int64(1) << np.int64(reader), len(rows) - 1
    for i in range(len(rows)):
        prefetch(window.newest, np.int64(rows[min(i + 2 * AHEAD, final)]))
        prefetch(window.ahead, window.newest[rows[min(i + AHEAD, final)]] & mask)
        row = rows[i]
        number = window.newest[row]
        if number >= newest:
            at = number & mask
            window.readers[at] = window.readers[at] | bit
        else:
            at = last & mask
            window.row[at] = row
            window.readers[at] = bit
            window.ahead[at] = 0
            window.holder[at], window.owner[at] = HOME, HOME
            window.place[at] = -1
            window.flags[at] = 0
            if number >= oldest:
                window.ahead[number & mask] = last - number
                if number >= before:
                    window.flags[at] = AGAIN
            window.newest[row] = last
            number = last
            last += 1
        numbers[i] = number
    return last


@kernel
def home_of(bounds: Ints, row: int) -> int:
    """The rank whose shard has the row."""
    home = 0
    while row >= bounds[home + 1]:
        home += 1
    return home


@kernel
def owner_of(site: Site, readers: int, source: int, home: int, row: int) -> int:
    """Who updates a row that ``readers`` touch, whose record is at rank ``source``: decision 2 of design note 0005."""
    if site.design != LRPP:
        return home if home < site.num_trainers else row % site.num_trainers
    if (readers >> source) & 1:
        return source
    if (readers >> home) & 1:
        return home
    count, rest = 0, readers
    while rest:
        rest &= rest - 1
        count += 1
    chosen = row % count
    for rank in range(len(site.bounds) - 1):
        if (readers >> rank) & 1:
            if chosen == 0:
                return rank
            chosen -= 1
    return home


@kernel
def reading(site: Site, readers: Any) -> Any:
    """Bits of the ranks that get a row's weights."""
    return (np.int64(1) << np.int64(site.num_trainers)) - 1 if site.design == REPLICATED else np.int64(readers)


@kernel
def count_arrivals(window: Window, site: Site, begin: int, end: int, which: int, needed: Ints) -> None:
    """Add to ``needed`` ``[P]`` the slots that the arrival of a step's rows takes on each rank, less those that it frees."""
    mask, num_ranks = len(window.row) - 1, len(site.bounds) - 1
    for number in range(begin, end):
        at = number & mask
        flags = window.flags[at]
        if flags & ARRIVED or (which == EARLY and flags & AGAIN):
            continue
        row, readers = np.int64(window.row[at]), np.int64(window.readers[at])
        home = home_of(site.bounds, row)
        source = home if window.holder[at] == HOME else np.int64(window.holder[at])
        owner = owner_of(site, readers, source, home, row)
        borrowers = reading(site, readers)
        for rank in range(num_ranks):
            if rank != source and ((rank == owner and rank != home) or (rank != owner and (borrowers >> rank) & 1)):
                needed[rank] += 1
        if owner != source and window.holder[at] != HOME and not (borrowers >> source) & 1:
            needed[source] -= 1


@kernel
def arrive(window: Window, site: Site, slots: Slots, begin: int, end: int, which: int) -> Travel:
    """Decide who owns the rows of a step, give places to those that come here, and list what travels.

    ``EARLY`` leaves out the rows that the step before touches too.
    """
    mask, num_ranks, here = len(window.row) - 1, len(site.bounds) - 1, site.rank
    counts, position = np.zeros((4, num_ranks), np.int64), np.zeros((4, num_ranks), np.int64)
    moving, num_moving = np.empty(end - begin, np.int64), 0
    for number in range(begin, end):
        at = number & mask
        flags = window.flags[at]
        if flags & ARRIVED or (which == EARLY and flags & AGAIN):
            continue
        row, readers = np.int64(window.row[at]), np.int64(window.readers[at])
        home = home_of(site.bounds, row)
        is_home = window.holder[at] == HOME
        source = home if is_home else np.int64(window.holder[at])
        owner = owner_of(site, readers, source, home, row)
        borrowers = reading(site, readers)
        window.owner[at] = owner
        window.flags[at] = flags | ARRIVED | (FROM_HOME if is_home else 0)
        if is_home and source == here:
            window.place[at] = row - site.bounds[here]
        if owner == source and borrowers == np.int64(1) << owner:
            continue
        moving[num_moving] = number
        num_moving += 1
        if owner != source and not is_home and not (borrowers >> source) & 1:
            slots.used[source] -= 1
        for rank in range(num_ranks):
            if rank != source and ((rank == owner and rank != home) or (rank != owner and (borrowers >> rank) & 1)):
                slots.used[rank] += 1
        if source == here:
            counts[0, owner] += owner != here
            for rank in range(num_ranks):
                counts[1, rank] += rank != owner and rank != here and (borrowers >> rank) & 1
        elif owner == here:
            counts[2, source] += 1
        elif (borrowers >> here) & 1:
            counts[3, source] += 1
    for rank in range(1, num_ranks):
        for kind in range(4):
            position[kind, rank] = position[kind, rank - 1] + counts[kind, rank - 1]
    records_out, weights_out = np.empty(counts[0].sum(), np.int64), np.empty(counts[1].sum(), np.int64)
    records_in, weights_in = np.empty(counts[2].sum(), np.int64), np.empty(counts[3].sum(), np.int64)
    rows_in, lent_in = np.empty(len(records_in), np.int64), np.empty(len(weights_in), np.int64)
    for i in range(num_moving):  # what leaves: its places are free for what comes in the same message
        at = moving[i] & mask
        is_home = window.flags[at] & FROM_HOME
        source = home_of(site.bounds, np.int64(window.row[at])) if is_home else np.int64(window.holder[at])
        if source != here:
            continue
        owner, place = np.int64(window.owner[at]), np.int64(window.place[at])
        borrowers = reading(site, np.int64(window.readers[at]))
        for rank in range(num_ranks):
            if rank != owner and rank != here and (borrowers >> rank) & 1:
                weights_out[position[1, rank]] = place
                position[1, rank] += 1
        if owner != here:
            records_out[position[0, owner]] = place
            position[0, owner] += 1
            if not (borrowers >> here) & 1:
                window.place[at] = -1
                if not is_home:
                    slots.free[slots.depth[0]] = place
                    slots.depth[0] += 1
    for i in range(num_moving):  # what comes
        at = moving[i] & mask
        row, owner = np.int64(window.row[at]), np.int64(window.owner[at])
        home = home_of(site.bounds, row)
        source = home if window.flags[at] & FROM_HOME else np.int64(window.holder[at])
        borrows = owner != here and (reading(site, np.int64(window.readers[at])) >> here) & 1
        if source == here or not (owner == here or borrows):
            continue
        if owner == here and home == here:
            place = row - site.bounds[here]
        else:
            slots.depth[0] -= 1
            place = np.int64(slots.free[slots.depth[0]])
        window.place[at] = place
        if borrows:
            weights_in[position[3, source]] = place
            lent_in[position[3, source]] = row
            position[3, source] += 1
        else:
            records_in[position[2, source]] = place
            rows_in[position[2, source]] = row
            position[2, source] += 1
    return Travel(records_out, weights_out, records_in, weights_in, counts, rows_in, lent_in)


@kernel
def is_due(ahead: int, number: int, limit: int) -> bool:
    """Whether a touch is followed by one before ``limit``; before ``NEVER`` even what is not followed at all."""
    return limit == NEVER or (ahead != 0 and number + ahead < limit)


@kernel
def urgency_of(window: Window, site: Site, number: int, owner: int, readers: int, soon: int) -> int:
    """Which of a step's three groups a touch belongs to."""
    if is_due(window.ahead[number & (len(window.row) - 1)], number, soon):
        return CRITICAL
    return ALONE if owner == site.rank and readers == np.int64(1) << site.rank else DEFERRED


@kernel
def settle(
    window: Window, site: Site, begin: int, end: int, soon: int, mine: Ints
) -> tuple[Gradients, Gradients, Gradients]:
    """Who gives which gradients to whom after a step, and what is updated of them here: ``CRITICAL``, ``DEFERRED``, ``ALONE``.

    Received gradients are numbered after this rank's own sums, critical ones first.

    Args:
        window: of all touches.
        site: the rules.
        begin: first touch of the step.
        end: of its touches.
        soon: rows whose next touch is before it are critical: the end of the next step's touches, or ``NEVER`` for all.
        mine: int64, this rank's touches of the step, in the order of its sums.
    """
    mask, num_ranks, here = len(window.row) - 1, len(site.bounds) - 1, site.rank
    sum_of = np.full(end - begin, -1, np.int32)
    for i in range(len(mine)):
        sum_of[mine[i] - begin] = i
    counts, position = np.zeros((3, 2, num_ranks), np.int64), np.zeros((3, 2, num_ranks), np.int64)
    num_rows, num_sources = np.zeros(3, np.int64), np.zeros(3, np.int64)
    for number in range(begin, end):
        at = number & mask
        owner, readers = np.int64(window.owner[at]), np.int64(window.readers[at])
        if owner == here:
            urgency = urgency_of(window, site, number, owner, readers, soon)
            num_rows[urgency] += 1
            if readers == np.int64(1) << here:
                num_sources[urgency] += 1
                continue
            for rank in range(num_ranks):
                touches = (readers >> rank) & 1
                num_sources[urgency] += touches
                if rank != here:
                    counts[urgency, 1, rank] += touches
        elif (readers >> here) & 1:
            counts[urgency_of(window, site, number, owner, readers, soon), 0, owner] += 1
    for urgency in range(3):
        for rank in range(1, num_ranks):
            for way in range(2):
                position[urgency, way, rank] = position[urgency, way, rank - 1] + counts[urgency, way, rank - 1]
    position[CRITICAL, 1] += len(mine)
    position[DEFERRED, 1] += len(mine) + counts[CRITICAL, 1].sum()
    num_given = counts[:, 0].sum(1)
    given = (np.empty(num_given[0], np.int64), np.empty(num_given[1], np.int64), np.empty(0, np.int64))
    places = (np.empty(num_rows[0], np.int64), np.empty(num_rows[1], np.int64), np.empty(num_rows[2], np.int64))
    segments = (
        np.zeros(num_rows[0] + 1, np.int32),
        np.zeros(num_rows[1] + 1, np.int32),
        np.zeros(num_rows[2] + 1, np.int32),
    )
    source = (
        np.empty(num_sources[0], np.int32),
        np.empty(num_sources[1], np.int32),
        np.empty(num_sources[2], np.int32),
    )
    num_rows[:], num_sources[:] = 0, 0
    for number in range(begin, end):
        at = number & mask
        owner, readers = np.int64(window.owner[at]), np.int64(window.readers[at])
        if owner == here:
            urgency = urgency_of(window, site, number, owner, readers, soon)
            row, filled = num_rows[urgency], num_sources[urgency]
            places[urgency][row] = window.place[at]
            for rank in range(num_ranks):
                if (readers >> rank) & 1:
                    if rank == here:
                        source[urgency][filled] = sum_of[number - begin]
                    else:
                        source[urgency][filled] = position[urgency, 1, rank]
                        position[urgency, 1, rank] += 1
                    filled += 1
            segments[urgency][row + 1] = filled
            num_rows[urgency], num_sources[urgency] = row + 1, filled
        elif (readers >> here) & 1:
            urgency = urgency_of(window, site, number, owner, readers, soon)
            given[urgency][position[urgency, 0, owner]] = sum_of[number - begin]
            position[urgency, 0, owner] += 1
    return (
        Gradients(given[0], counts[0], places[0], segments[0], source[0]),
        Gradients(given[1], counts[1], places[1], segments[1], source[1]),
        Gradients(given[2], counts[2], places[2], segments[2], source[2]),
    )


@kernel
def close(window: Window, site: Site, slots: Slots, begin: int, end: int, horizon: int) -> Ints:
    """End a step: borrowed weights give their slots back, and records wait where they are for touches before ``horizon``.

    Returns the touches whose records have to go home.
    """
    mask, num_ranks, here = len(window.row) - 1, len(site.bounds) - 1, site.rank
    leaving, num_leaving = np.empty(end - begin, np.int64), 0
    for number in range(begin, end):
        far = min(number + AHEAD, end - 1)
        far = (far + window.ahead[far & mask]) & mask
        prefetch(window.holder, far)
        prefetch(window.place, far)
        at = number & mask
        owner, home = np.int64(window.owner[at]), home_of(site.bounds, np.int64(window.row[at]))
        borrowers = reading(site, np.int64(window.readers[at])) & ~(np.int64(1) << owner)
        if borrowers:
            was_home = window.flags[at] & FROM_HOME
            for rank in range(num_ranks):
                if (borrowers >> rank) & 1 and not (rank == home and was_home):
                    slots.used[rank] -= 1
                    if rank == here:
                        slots.free[slots.depth[0]] = window.place[at]
                        slots.depth[0] += 1
        if owner == home:
            continue
        if is_due(window.ahead[at], number, horizon):
            then = (number + window.ahead[at]) & mask
            window.holder[then] = owner
            if owner == here:
                window.place[then] = window.place[at]
        else:
            leaving[num_leaving] = number
            num_leaving += 1
    return leaving[:num_leaving].copy()


@kernel
def waiting_for(window: Window, begin: int, end: int) -> Ints:
    """Touches of a step, not arrived, for which records wait in slots; from now on these count as at home."""
    mask, found, num_found = len(window.row) - 1, np.empty(end - begin, np.int64), 0
    for number in range(begin, end):
        at = number & mask
        if window.holder[at] != HOME and not window.flags[at] & ARRIVED:
            window.owner[at] = window.holder[at]
            window.holder[at] = HOME
            found[num_found] = number
            num_found += 1
    return found[:num_found].copy()


@kernel
def go_home(window: Window, site: Site, slots: Slots, leaving: Ints) -> Travel:
    """List the records that go home from the slots of the touches' owners, and free these."""
    mask, num_ranks, here = len(window.row) - 1, len(site.bounds) - 1, site.rank
    counts, position = np.zeros((4, num_ranks), np.int64), np.zeros((4, num_ranks), np.int64)
    for number in leaving:
        at = number & mask
        home, holder = home_of(site.bounds, np.int64(window.row[at])), np.int64(window.owner[at])
        counts[0, home] += holder == here
        counts[2, holder] += home == here
    for rank in range(1, num_ranks):
        for kind in (0, 2):
            position[kind, rank] = position[kind, rank - 1] + counts[kind, rank - 1]
    records_out, records_in = np.empty(counts[0].sum(), np.int64), np.empty(counts[2].sum(), np.int64)
    rows_in, nothing = np.empty(len(records_in), np.int64), np.empty(0, np.int64)
    for number in leaving:
        at = number & mask
        row, holder = np.int64(window.row[at]), np.int64(window.owner[at])
        home = home_of(site.bounds, row)
        slots.used[holder] -= 1
        if holder == here:
            records_out[position[0, home]] = window.place[at]
            position[0, home] += 1
            slots.free[slots.depth[0]] = window.place[at]
            slots.depth[0] += 1
            window.place[at] = -1
        if home == here:
            records_in[position[2, holder]] = row - site.bounds[here]
            rows_in[position[2, holder]] = row
            position[2, holder] += 1
    return Travel(records_out, nothing, records_in, nothing, counts, rows_in, nothing)


@kernel
def places_of(window: Window, numbers: Ints, places: Ints) -> None:
    """Write where this rank reads each of its touches."""
    mask = len(window.row) - 1
    for i in range(len(numbers)):
        places[i] = window.place[numbers[i] & mask]


@kernel
def move(window: Window, larger: Window, begin: int, end: int) -> None:
    """Copy touches into a larger ring."""
    old, new = len(window.row) - 1, len(larger.row) - 1
    for number in range(begin, end):
        larger.row[number & new] = window.row[number & old]
        larger.readers[number & new] = window.readers[number & old]
        larger.ahead[number & new] = window.ahead[number & old]
        larger.holder[number & new] = window.holder[number & old]
        larger.owner[number & new] = window.owner[number & old]
        larger.place[number & new] = window.place[number & old]
        larger.flags[number & new] = window.flags[number & old]
