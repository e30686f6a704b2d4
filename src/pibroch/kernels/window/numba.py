"""The lookahead oracle's bookkeeping: who touches which row when, where its record is, and what must travel.

A **touch** is a row in a step. Touches are numbered in the order of their steps and lie in a ring; kernels name them by their
index there. All ranks keep the same touches; only ``place``, and ``slot``, are a rank's own. A step's touches are
walked four times, when they are entered, when they arrive, and twice when the step ends. These loops have next to no branches,
which nobody could predict, and unsigned indices, which need no look at their sign: each made them a third quicker. In place of
``if condition: list.append(at)`` they write ``at`` to the list's end always and move the end by the condition, so lists are as
long as the loop, and what lies behind an end means nothing.

N rows whose state is kept, each with a number, C touches in the ring (a power of two), W ranks that train, and servers beyond
them that hold homes and read nothing: ranks 0 to W - 1 and W to P - 1.
"""

from __future__ import annotations

import numpy as np

from pibroch.kernels.arrays import Array, Ints
from pibroch.kernels.bits import lowest
from pibroch.kernels.memory import prefetch
from pibroch.kernels.policy import kernel
from pibroch.kernels.window.rules import (
    HOME,
    Places,
    Site,
    Slots,
    Transfer,
    Window,
    add_bits,
    always_reading,
    home_of,
    owner_of,
    slots_taken,
    starts_of,
)

AHEAD = 32  # rows between the one that is looked at and the one that is fetched


@kernel
def enter(window: Window, rows: Array, numbers: Array, reader: int, begin: int, end: int, touches: Places) -> int:
    """Note that ``reader`` touches ``rows`` (duplicates allowed) in the newest step; returns the step's new end.

    Args:
        window: has room for as many touches from ``begin`` on, side by side.
        rows: addresses.
        numbers: of these rows.
        reader: rank.
        begin: index of the step's first touch.
        end: index behind its last one so far.
        touches: int32 ``[len(rows)]``, receives the touches.
    """
    mask, bit, final = len(window.row) - 1, np.int64(1) << np.int64(reader), len(rows) - 1
    newest, row_of, readers_of, behind_of = window.newest, window.row, window.readers, window.behind
    number_of = window.number
    for i in range(len(rows)):
        prefetch(newest, np.int64(numbers[min(i + AHEAD, final)]))
        number = np.uint64(numbers[i])
        before = np.int64(newest[number]) - 1  # the row's last touch, -1 for none in the window
        is_there = (before >= begin) & (before < end)
        at = before if is_there else end  # another rank's touch of the step counts for this one too
        row_of[at] = rows[i]
        number_of[at] = numbers[i]
        readers_of[at] = (np.int64(readers_of[at]) if is_there else 0) | bit
        distance = (end - before) & mask if before >= 0 else 0
        behind_of[at] = behind_of[at] if is_there else distance
        newest[number] = np.int64(at) + 1
        touches[i] = at
        end += not is_there
    return end


@kernel
def split(window: Window, begin: int, end: int, gap: int) -> tuple[Places, Places]:
    """Of a complete step: touches of rows that are new, and of those that the step before touches too, to whom it tells this.

    Args:
        window: of all touches.
        begin: index of the step's first touch.
        end: index behind its last one.
        gap: how much lower the number of the first touch of the step before is.
    """
    mask = len(window.row) - 1
    touches = np.empty((2, end - begin), np.int32)  # the new ones, and the others
    num_fresh, num_again, behind_of, then_of = 0, 0, window.behind, window.then
    for at in range(begin, end):
        then_of[at] = 0
        behind = np.int64(behind_of[at])
        is_again = (behind != 0) & (behind <= at - begin + gap)  # not further back than the step before begins
        touches[0, num_fresh] = at
        touches[1, num_again] = at
        num_fresh += not is_again
        num_again += is_again
    again = touches[1, :num_again].copy()
    for at in again:
        then_of[(at - behind_of[at]) & mask] = window.readers[at]
    return touches[0, :num_fresh].copy(), again


@kernel
def count_arrivals(window: Window, site: Site, touches: Places, needed: Ints) -> None:
    """Add to ``needed`` ``[P]`` the slots that the arrival of touches takes on each rank, less those that it frees."""
    for at in touches:
        row, readers = np.int64(window.row[at]), np.int64(window.readers[at])
        home, holder = home_of(site.bounds, row), np.int64(window.holder[window.number[at]])
        source = home if holder == HOME else holder
        then = np.int64(window.then[at])
        owner = owner_of(site.design, site.num_trainers, readers, then, source, home, row)
        borrowers = readers | always_reading(site)
        taken = slots_taken(borrowers, source, owner, home)
        for rank in range(len(needed)):
            needed[rank] += (taken >> rank) & 1
        if owner != source and holder != HOME and not (borrowers >> source) & 1:
            needed[source] -= 1


@kernel
def arrive(window: Window, site: Site, slots: Slots, touches: Places) -> tuple[Transfer, Places]:
    """Decide who owns rows in a step, give places to those that come here, and list what travels.

    Returns also the touches that concern this rank: it owns the row, or reads it.
    """
    here, bounds, always, only_here = site.rank, site.bounds, always_reading(site), np.int64(1) << np.int64(site.rank)
    row_of, readers_of, then_of, owners, lent_of = window.row, window.readers, window.then, window.owner, window.lent
    number_of = window.number
    place_of, holders, slot_of, first = window.place, window.holder, window.slot, site.bounds[site.rank]
    size, final = len(touches), len(touches) - 1
    mine, num_mine, held, num_held = np.empty(size, np.int32), np.uint64(0), np.empty(size, np.int32), np.uint64(0)
    taken, freed, num_moving = np.empty(size, readers_of.dtype), np.empty(size, readers_of.dtype), np.uint64(0)
    lists, lengths = np.empty((4, size), np.int32), np.zeros(4, np.int64)
    others = np.empty((4, size), readers_of.dtype)
    leave, lend, come, borrow = np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(0)
    for i in range(size):
        prefetch(holders, np.int64(number_of[touches[min(i + AHEAD, final)]]))
        at = np.uint64(touches[i])
        row, number, readers = np.int64(row_of[at]), np.uint64(number_of[at]), np.int64(readers_of[at])
        home, holder = home_of(bounds, row), np.int64(holders[number])
        is_home = holder == HOME
        source = home if is_home else holder
        owner = owner_of(site.design, site.num_trainers, readers, np.int64(then_of[at]), source, home, row)
        borrowers = (
            readers | always
        )  # who needs the weights in the step; the owner, who updates, has them by its record
        owns, had = np.int64(1) << np.int64(owner), np.int64(1) << np.int64(source)
        reads, is_owner, is_source = (borrowers & only_here) != 0, owner == here, source == here
        owners[at], place_of[at] = owner, row - first
        lent = borrowers & ~owns
        lent_of[at] = lent & ~(np.int64(is_home) << np.int64(home))  # a home that is read in place takes no slot
        holders[number] = HOME if owner == home else owner
        held[num_held], mine[num_mine] = at, at
        num_held += np.uint64(holder == here)
        num_mine += np.uint64(is_owner | reads)
        # rows that stay where they are, which most do, change no rank's count of slots
        taken[num_moving] = slots_taken(borrowers, source, owner, home)
        freed[num_moving] = had & ~borrowers & ~owns & (np.int64(is_home) - 1)
        num_moving += np.uint64((owns | borrowers | had) != had)
        lists[0, leave], others[0, leave] = at, owns
        leave += np.uint64(is_source & (not is_owner))
        lists[1, lend], others[1, lend] = at, lent & ~only_here
        lend += np.uint64(is_source & ((lent & ~only_here) != 0))
        lists[2, come], others[2, come] = at, had
        come += np.uint64(is_owner & (not is_source))
        lists[3, borrow], others[3, borrow] = at, had
        borrow += np.uint64(reads & (not is_owner) & (not is_source))
    # of records that this rank held its slot is known here alone; it may be given away below, hence before that
    for i in range(int(num_held)):
        ahead = min(i + AHEAD, int(num_held) - 1)
        prefetch(slot_of, np.int64(number_of[held[ahead]]))
        place_of[held[i]] = slot_of[number_of[held[i]]]
    add_bits(taken[:num_moving], 1, slots.used)
    add_bits(freed[:num_moving], -1, slots.used)
    lengths[:] = leave, lend, come, borrow
    return _list(window, site, slots, lists, others, lengths), mine[:num_mine].copy()


@kernel
def _list(window: Window, site: Site, slots: Slots, lists: Places, others: Array, lengths: Ints) -> Transfer:
    """Group by rank what leaves, whose places are free for what comes in the same message, and what comes.

    Args:
        window: of all touches.
        site: the rules.
        slots: in use.
        lists: touches ``[4, .]`` of records and weights that leave, and of those that come.
        others: bits of the ranks to or from which.
        lengths: how many there are in each list.
    """
    here, first, num_home, free, depth = site.rank, site.bounds[site.rank], site.num_home, slots.free, slots.depth[0]
    row_of, place_of, slot_of, lent_of = window.row, window.place, window.slot, window.lent
    number_of = window.number
    counts = np.zeros((4, len(site.bounds) - 1), np.int64)
    for kind in range(4):
        add_bits(others[kind, : lengths[kind]], 1, counts[kind])
    position, sums = starts_of(counts), counts.sum(1)
    records_out, weights_out = np.empty(sums[0], np.int64), np.empty(sums[1], np.int64)
    records_in, weights_in = np.empty(sums[2], np.int64), np.empty(sums[3], np.int64)
    rows_in, lent_in = np.empty(sums[2], np.int64), np.empty(sums[3], np.int64)
    # The order of the four matters: weights are lent from places that leaving records give free, and what comes takes them.
    # All ranks list a message's rows in the order of the touches, so none is named on the wire.
    for i in range(lengths[1]):
        rest, place = np.int64(others[1, i]), place_of[lists[1, i]]
        while rest:
            rank = lowest(rest)
            weights_out[position[1, rank]] = place
            position[1, rank] += 1
            rest &= rest - 1
    for i in range(lengths[0]):
        place, rank = place_of[lists[0, i]], lowest(np.int64(others[0, i]))
        records_out[position[0, rank]] = place
        position[0, rank] += 1
        free[depth] = place  # unless it is a place of its own shard, or is still read here in this step
        depth += (place >= num_home) & ((np.int64(lent_of[lists[0, i]]) >> here) & 1 == 0)
    for i in range(lengths[2]):
        prefetch(slot_of, np.int64(number_of[lists[2, min(i + AHEAD, lengths[2] - 1)]]))
        at, rank = lists[2, i], lowest(np.int64(others[2, i]))
        row = np.int64(row_of[at])
        is_here = (row >= first) & (row < first + num_home)
        depth -= not is_here
        slot = np.int64(free[depth])
        place = row - first if is_here else slot
        slot_of[number_of[at]], place_of[at] = place, place
        records_in[position[2, rank]], rows_in[position[2, rank]] = place, row
        position[2, rank] += 1
    for i in range(lengths[3]):
        at, rank = lists[3, i], lowest(np.int64(others[3, i]))
        depth -= 1
        place = free[depth]
        place_of[at] = place
        weights_in[position[3, rank]], lent_in[position[3, rank]] = place, row_of[at]
        position[3, rank] += 1
    slots.depth[0] = depth
    return Transfer(records_out, weights_out, records_in, weights_in, counts, rows_in, lent_in)


@kernel
def close(window: Window, slots: Slots, begin: int, end: int) -> tuple[Places, Places]:
    """End a step on all ranks: slots with weights for this step only are no longer in use.

    Returns the touches whose rows nobody in the window touches again, and those of them whose records have to go home.
    """
    add_bits(window.lent[begin:end], -1, slots.used)
    last, num_last = np.empty(end - begin, np.int32), np.uint64(0)
    newest, number_of, holders = window.newest, window.number, window.holder
    for at in range(begin, end):
        prefetch(newest, np.int64(number_of[min(at + AHEAD, end - 1)]))
        last[num_last] = at
        num_last += np.uint64(newest[np.uint64(number_of[at])] == at + 1)  # no later touch in the window
    leaving, num_leaving = np.empty(num_last, np.int32), np.uint64(0)
    for at in last[:num_last]:
        number = np.uint64(number_of[at])
        newest[number] = 0
        leaving[num_leaving] = at
        num_leaving += np.uint64(holders[number] != HOME)
    return last[:num_last].copy(), leaving[:num_leaving].copy()


@kernel
def waiting_for(window: Window, touches: Places, begin: int, gap: int) -> Places:
    """Of touches of a step that have not arrived, those for which records wait in slots; the holders own these rows now.

    Args:
        window: of all touches.
        touches: of the step.
        begin: index of its first touch.
        gap: how much lower the number of the first touch is that has not been trained.
    """
    found, num_found = np.empty(len(touches), np.int32), 0
    for at in touches:
        number = window.number[at]
        if window.holder[number] != HOME and window.behind[at] > at - begin + gap:
            window.owner[at], window.place[at] = window.holder[number], window.slot[number]
            found[num_found] = at
            num_found += 1
    return found[:num_found].copy()


@kernel
def go_home(window: Window, site: Site, slots: Slots, leaving: Places) -> Transfer:
    """List the records that go home from the slots of the touches' owners, and free these."""
    num_ranks, here = len(site.bounds) - 1, site.rank
    counts = np.zeros((4, num_ranks), np.int64)
    for at in leaving:
        home, holder = home_of(site.bounds, np.int64(window.row[at])), np.int64(window.owner[at])
        counts[0, home] += holder == here
        counts[2, holder] += home == here
        slots.used[holder] -= 1  # every rank keeps count for all: it must know where there is room
    position = starts_of(counts)
    records_out, records_in = np.empty(counts[0].sum(), np.int64), np.empty(counts[2].sum(), np.int64)
    rows_in, nothing = np.empty(len(records_in), np.int64), np.empty(0, np.int64)
    for at in leaving:
        row, holder = np.int64(window.row[at]), np.int64(window.owner[at])
        home = home_of(site.bounds, row)
        window.holder[window.number[at]] = HOME
        if holder == here:
            records_out[position[0, home]] = window.place[at]
            position[0, home] += 1
            slots.free[slots.depth[0]] = window.place[at]
            slots.depth[0] += 1
        if home == here:
            records_in[position[2, holder]], rows_in[position[2, holder]] = row - site.bounds[here], row
            position[2, holder] += 1
    return Transfer(records_out, nothing, records_in, nothing, counts, rows_in, nothing)


@kernel
def places_of(window: Window, touches: Places, places: Ints) -> None:
    """Write where this rank reads each of its touches."""
    for i in range(len(touches)):
        places[i] = window.place[touches[i]]


@kernel
def forget(window: Window, begin: int, end: int) -> None:
    """Rows of a step are in nobody's window, and at home."""
    for at in range(begin, end):
        window.newest[window.number[at]], window.holder[window.number[at]] = 0, HOME


@kernel
def move(window: Window, larger: Window, begin: int, end: int, to: int) -> None:
    """Copy a step's touches to index ``to`` of a larger ring; steps are moved in their order."""
    shift = to - begin
    for at in range(begin, end):
        larger.row[at + shift] = window.row[at]
        larger.number[at + shift] = window.number[at]
        larger.readers[at + shift] = window.readers[at]
        larger.behind[at + shift] = window.behind[at]
        larger.then[at + shift] = window.then[at]
        larger.owner[at + shift] = window.owner[at]
        larger.lent[at + shift] = window.lent[at]
        larger.place[at + shift] = window.place[at]
        window.newest[window.number[at]] = at + shift + 1
