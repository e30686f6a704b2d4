"""The lookahead oracle's bookkeeping: who touches which row when, where its record is, and what must travel.

A **touch** is a row in a step. Touches are numbered from 1 in the order of their steps and lie in a ring; each knows the row's
next touch. All ranks keep the same touches; only ``place`` is a rank's own. Costs a few nanoseconds a touch, whatever the
length of the window.

N rows (addresses), C touches in the ring (a power of two), W ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.policy import kernel

HOME = -1  # holder of a record that is at its home
AGAIN, ARRIVED, FROM_HOME = 1, 2, 4  # flags of a touch, see Window
LRPP, PARTITIONED, REPLICATED = 0, 1, 2
EARLY, ALL = 0, 1
CRITICAL, DEFERRED = 0, 1
NEVER = 1 << 62

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
        bounds: int64 ``[W + 1]``, first address of each home.
        rank: whose view is wanted.
        design: ``LRPP``, ``PARTITIONED`` or ``REPLICATED``.
        num_home: places below it are rows of this rank's home.
    """

    bounds: Ints
    rank: int
    design: int
    num_home: int


class Slots(NamedTuple):
    """Places for what is not at home here: a stack of free ones, and how many every rank has in use.

    Attributes:
        free: int32, a stack.
        depth: int64 ``[1]``, free places on the stack.
        used: int64 ``[W]``.
    """

    free: NDArray[np.int32]
    depth: Ints
    used: Ints


class Travel(NamedTuple):
    """Rows that travel; everything is grouped by the other rank, in the order of the touches.

    Attributes:
        records_out, weights_out: int64 places here of records that leave for good, and of weights that are lent.
        records_in, weights_in: int64 places here for those that come.
        counts: int64 ``[4, W]``, how many of these four to or from each rank.
        rows_in: addresses of ``records_in``.
    """

    records_out: Ints
    weights_out: Ints
    records_in: Ints
    weights_in: Ints
    counts: Ints
    rows_in: Ints


class Gradients(NamedTuple):
    """Gradients that travel, and the updates made of them.

    Attributes:
        given: int64, positions among this rank's sums of gradients that leave, grouped by owner.
        counts: int64 ``[2, W]``, how many go to, and how many come from each rank.
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
    bit = np.int64(1) << np.int64(reader)
    for i in range(len(rows)):
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
        return home
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
    return (np.int64(1) << np.int64(len(site.bounds) - 1)) - 1 if site.design == REPLICATED else np.int64(readers)


@kernel
def count_arrivals(window: Window, site: Site, begin: int, end: int, which: int, needed: Ints) -> None:
    """Add to ``needed`` ``[W]`` the slots that the arrival of a step's rows takes on each rank, less those that it frees."""
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
    counts, place_of = np.zeros((4, num_ranks), np.int64), np.zeros((4, num_ranks), np.int64)
    for number in range(begin, end):
        at = number & mask
        flags = window.flags[at]
        if flags & ARRIVED or (which == EARLY and flags & AGAIN):
            continue
        row, readers = np.int64(window.row[at]), np.int64(window.readers[at])
        home = home_of(site.bounds, row)
        source = home if window.holder[at] == HOME else np.int64(window.holder[at])
        owner = owner_of(site, readers, source, home, row)
        window.owner[at] = owner
        borrowers = reading(site, readers)
        if source == here:
            counts[0, owner] += owner != here
            for rank in range(num_ranks):
                counts[1, rank] += rank != owner and rank != here and (borrowers >> rank) & 1
        elif owner == here:
            counts[2, source] += 1
        elif (borrowers >> here) & 1:
            counts[3, source] += 1
    for kind in range(4):
        for rank in range(1, num_ranks):
            place_of[kind, rank] = place_of[kind, rank - 1] + counts[kind, rank - 1]
    records_out, weights_out = np.empty(counts[0].sum(), np.int64), np.empty(counts[1].sum(), np.int64)
    records_in, weights_in = np.empty(counts[2].sum(), np.int64), np.empty(counts[3].sum(), np.int64)
    rows_in = np.empty(len(records_in), np.int64)
    for number in range(begin, end):  # what leaves: places are free for what comes in the same message
        at = number & mask
        flags = window.flags[at]
        if flags & ARRIVED or (which == EARLY and flags & AGAIN):
            continue
        row = np.int64(window.row[at])
        is_home = window.holder[at] == HOME
        home = home_of(site.bounds, row)
        source, owner = home if is_home else np.int64(window.holder[at]), np.int64(window.owner[at])
        borrowers = reading(site, np.int64(window.readers[at]))
        if owner != source and not is_home and not (borrowers >> source) & 1:
            slots.used[source] -= 1
        if source != here:
            continue
        place = row - site.bounds[here] if is_home else np.int64(window.place[at])
        for rank in range(num_ranks):
            if rank != owner and rank != here and (borrowers >> rank) & 1:
                weights_out[place_of[1, rank]] = place
                place_of[1, rank] += 1
        window.place[at] = place
        if owner != here:
            records_out[place_of[0, owner]] = place
            place_of[0, owner] += 1
            if not (borrowers >> here) & 1:
                window.place[at] = -1
                if not is_home:
                    slots.free[slots.depth[0]] = place
                    slots.depth[0] += 1
    for number in range(begin, end):
        at = number & mask
        flags = window.flags[at]
        if flags & ARRIVED or (which == EARLY and flags & AGAIN):
            continue
        row = np.int64(window.row[at])
        is_home = window.holder[at] == HOME
        home = home_of(site.bounds, row)
        source, owner = home if is_home else np.int64(window.holder[at]), np.int64(window.owner[at])
        borrowers = reading(site, np.int64(window.readers[at]))
        for rank in range(num_ranks):
            if rank != source and ((rank == owner and rank != home) or (rank != owner and (borrowers >> rank) & 1)):
                slots.used[rank] += 1
        window.flags[at] = flags | ARRIVED | (FROM_HOME if is_home else 0)
        if source == here or not (owner == here or (borrowers >> here) & 1):
            continue
        if owner == here and home == here:
            place = row - site.bounds[here]
        else:
            slots.depth[0] -= 1
            place = np.int64(slots.free[slots.depth[0]])
        window.place[at] = place
        kind = 2 if owner == here else 3
        if kind == 2:
            records_in[place_of[2, source]] = place
            rows_in[place_of[2, source]] = row
        else:
            weights_in[place_of[3, source]] = place
        place_of[kind, source] += 1
    return Travel(records_out, weights_out, records_in, weights_in, counts, rows_in)


@kernel
def is_due(ahead: int, number: int, limit: int) -> bool:
    """Whether a touch is followed by one before ``limit``; before ``NEVER`` even what is not followed at all."""
    return limit == NEVER or (ahead != 0 and number + ahead < limit)


@kernel
def settle(
    window: Window, site: Site, begin: int, end: int, soon: int, mine: Ints, urgency: int, num_sums: int
) -> Gradients:
    """Who gives which gradients to whom after a step, and what is updated of them here.

    Args:
        window: of all touches.
        site: the rules.
        begin: first touch of the step.
        end: of its touches.
        soon: end of the next step's touches, or ``NEVER`` if all of them count as critical.
        mine: int64, this rank's touches of the step, in the order of its sums.
        urgency: ``CRITICAL`` for rows whose next touch is before ``soon``, ``DEFERRED`` for the others.
        num_sums: number of the first received gradient among the sources.
    """
    mask, num_ranks, here = len(window.row) - 1, len(site.bounds) - 1, site.rank
    sum_of = np.full(end - begin, -1, np.int32)
    for i in range(len(mine)):
        sum_of[mine[i] - begin] = i
    counts, position = np.zeros((2, num_ranks), np.int64), np.zeros((2, num_ranks), np.int64)
    num_rows, num_sources = 0, 0
    for number in range(begin, end):
        at = number & mask
        if is_due(window.ahead[at], number, soon) != (urgency == CRITICAL):
            continue
        owner, readers = np.int64(window.owner[at]), np.int64(window.readers[at])
        if owner == here:
            num_rows += 1
            for rank in range(num_ranks):
                touches = (readers >> rank) & 1
                num_sources += int(touches)
                if rank != here:
                    counts[1, rank] += touches
        elif (readers >> here) & 1:
            counts[0, owner] += 1
    for rank in range(1, num_ranks):
        for way in range(2):
            position[way, rank] = position[way, rank - 1] + counts[way, rank - 1]
    given, places = np.empty(counts[0].sum(), np.int64), np.empty(num_rows, np.int64)
    segments, source = np.empty(num_rows + 1, np.int32), np.empty(num_sources, np.int32)
    segments[0] = 0
    num_rows, num_sources = 0, 0
    for number in range(begin, end):
        at = number & mask
        if is_due(window.ahead[at], number, soon) != (urgency == CRITICAL):
            continue
        owner, readers = np.int64(window.owner[at]), np.int64(window.readers[at])
        if owner == here:
            places[num_rows] = window.place[at]
            for rank in range(num_ranks):
                if (readers >> rank) & 1:
                    if rank == here:
                        source[num_sources] = sum_of[number - begin]
                    else:
                        source[num_sources] = num_sums + position[1, rank]
                        position[1, rank] += 1
                    num_sources += 1
            num_rows += 1
            segments[num_rows] = num_sources
        elif (readers >> here) & 1:
            given[position[0, owner]] = sum_of[number - begin]
            position[0, owner] += 1
    return Gradients(given, counts, places, segments, source)


@kernel
def release(window: Window, site: Site, slots: Slots, begin: int, end: int) -> None:
    """Free the slots of weights that a step has borrowed."""
    mask, num_ranks, here = len(window.row) - 1, len(site.bounds) - 1, site.rank
    for number in range(begin, end):
        at = number & mask
        owner, borrowers = np.int64(window.owner[at]), reading(site, np.int64(window.readers[at]))
        was_home = window.flags[at] & FROM_HOME
        home = home_of(site.bounds, np.int64(window.row[at]))
        for rank in range(num_ranks):
            if rank != owner and (borrowers >> rank) & 1 and not (rank == home and was_home):
                slots.used[rank] -= 1
                if rank == here:
                    slots.free[slots.depth[0]] = window.place[at]
                    slots.depth[0] += 1


@kernel
def link(window: Window, site: Site, begin: int, end: int, horizon: int) -> None:
    """Tell each row's next touch, if it is before ``horizon``, where the record will wait for it."""
    mask = len(window.row) - 1
    for number in range(begin, end):
        at = number & mask
        owner = window.owner[at]
        if is_due(window.ahead[at], number, horizon) and owner != home_of(site.bounds, np.int64(window.row[at])):
            then = (number + window.ahead[at]) & mask
            window.holder[then] = owner
            if owner == site.rank:
                window.place[then] = window.place[at]


@kernel
def leave(window: Window, site: Site, slots: Slots, begin: int, end: int, horizon: int) -> Travel:
    """List the records that go home after a step: those with no touch before ``horizon``."""
    mask, num_ranks, here = len(window.row) - 1, len(site.bounds) - 1, site.rank
    counts, position = np.zeros((4, num_ranks), np.int64), np.zeros((4, num_ranks), np.int64)
    for number in range(begin, end):
        at = number & mask
        if not is_due(window.ahead[at], number, horizon):
            owner, home = np.int64(window.owner[at]), home_of(site.bounds, np.int64(window.row[at]))
            counts[0, home] += owner == here and home != here
            counts[2, owner] += home == here and owner != here
    travel: Travel = go_home(window, site, slots, begin, end, horizon, counts, position, window.owner)
    return travel


@kernel
def retreat(window: Window, site: Site, slots: Slots, begin: int, end: int) -> Travel:
    """List the records that wait for a step's touches, as it has not begun, and now go home."""
    mask, num_ranks, here = len(window.row) - 1, len(site.bounds) - 1, site.rank
    counts, position = np.zeros((4, num_ranks), np.int64), np.zeros((4, num_ranks), np.int64)
    for number in range(begin, end):
        at = number & mask
        if window.holder[at] != HOME and not window.flags[at] & ARRIVED:
            home = home_of(site.bounds, np.int64(window.row[at]))
            counts[0, home] += window.holder[at] == here
            counts[2, window.holder[at]] += home == here
    travel: Travel = go_home(window, site, slots, begin, end, -1, counts, position, window.holder)
    for number in range(begin, end):
        at = number & mask
        if window.holder[at] != HOME and not window.flags[at] & ARRIVED:
            window.holder[at] = HOME
            window.place[at] = -1
    return travel


@kernel
def go_home(
    window: Window, site: Site, slots: Slots, begin: int, end: int, horizon: int, counts: Ints, position: Ints,
    holder_of: NDArray[np.int8],
) -> Travel:  # fmt: skip
    """What :func:`leave` and, with a negative ``horizon``, :func:`retreat` have in common."""
    mask, num_ranks, here = len(window.row) - 1, len(site.bounds) - 1, site.rank
    for rank in range(1, num_ranks):
        for kind in (0, 2):
            position[kind, rank] = position[kind, rank - 1] + counts[kind, rank - 1]
    records_out, records_in = np.empty(counts[0].sum(), np.int64), np.empty(counts[2].sum(), np.int64)
    rows_in, nothing = np.empty(len(records_in), np.int64), np.empty(0, np.int64)
    for number in range(begin, end):
        at = number & mask
        row, holder = np.int64(window.row[at]), np.int64(holder_of[at])
        home = home_of(site.bounds, row)
        if horizon < 0:
            leaves = holder != HOME and not window.flags[at] & ARRIVED
        else:
            leaves = holder != home and not is_due(window.ahead[at], number, horizon)
        if not leaves:
            continue
        slots.used[holder] -= 1
        if holder == here:
            records_out[position[0, home]] = window.place[at]
            position[0, home] += 1
            slots.free[slots.depth[0]] = window.place[at]
            slots.depth[0] += 1
        if home == here:
            records_in[position[2, holder]] = row - site.bounds[here]
            rows_in[position[2, holder]] = row
            position[2, holder] += 1
    return Travel(records_out, nothing, records_in, nothing, counts, rows_in)


@kernel
def count_waiting(window: Window, begin: int, end: int, waiting: Ints) -> None:
    """Add to ``waiting`` ``[W]`` the slots whose records wait for a step's touches that have not arrived."""
    mask = len(window.row) - 1
    for number in range(begin, end):
        holder = window.holder[number & mask]
        if holder != HOME and not window.flags[number & mask] & ARRIVED:
            waiting[holder] += 1


@kernel
def places_of(window: Window, numbers: Ints, places: Ints) -> None:
    """Write where this rank reads each of its touches."""
    mask = len(window.row) - 1
    for i in range(len(numbers)):
        places[i] = window.place[numbers[i] & mask]


@kernel
def forget(window: Window, begin: int, end: int) -> None:
    """All records are at home, and nothing has arrived."""
    mask = len(window.row) - 1
    for number in range(begin, end):
        at = number & mask
        window.holder[at], window.owner[at] = HOME, HOME
        window.place[at] = -1
        window.flags[at] &= AGAIN


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
