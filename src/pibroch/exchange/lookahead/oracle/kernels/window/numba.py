"""The lookahead oracle's bookkeeping: who touches which row when, where its record is, what moves.

A **touch** is a row in a step. Touches are numbered in the order of their steps and lie in a ring;
kernels name them by their index there. All ranks keep the same touches; only ``place``, and
``slot``, are a rank's own. A step's touches are walked four times, when they are entered, when they
arrive, and twice when the step ends. These loops have next to no branches, which nobody could
predict, and unsigned indices, which need no look at their sign: each made them a third quicker. In
place of ``if condition: list.append(at)`` they write ``at`` to the list's end always and move the
end by the condition, so lists are as long as the loop, and what lies behind an end means nothing.

N rows whose state is kept, each with a number, C touches in the ring (a power of two), W ranks that
train, and servers beyond them that hold homes and read nothing: ranks 0 to W - 1 and W to P - 1.
"""

from __future__ import annotations

import numpy as np

from pibroch.exchange.lookahead.oracle.kernels.window.masks import (
    BITS,
    add_bits,
    bit_in,
    is_in,
    lowest_in,
    word_of,
)
from pibroch.exchange.lookahead.oracle.kernels.window.rules import (
    AHEAD,
    HOME,
    Places,
    Site,
    Slots,
    Transfer,
    Window,
    always_reading,
    home_of,
    owner_of,
    slots_taken,
    starts_of,
)
from pibroch.kernels.arrays import Array, Ints
from pibroch.kernels.bits import lowest
from pibroch.kernels.memory import prefetch
from pibroch.kernels.policy import kernel


@kernel
def enter(
    window: Window, rows: Array, numbers: Array, bounds: Ints, begin: int, touches: Places
) -> int:
    """Note who touches which rows (duplicates allowed) in the newest step.

    Returns the index behind the step's last touch.

    Args:
        window: has room for as many touches from ``begin`` on, side by side.
        rows: addresses, of all ranks in their order.
        numbers: of these rows.
        bounds: int64 ``[W + 1]``, of the rows of each rank.
        begin: index of the step's first touch.
        touches: int32 ``[len(rows)]``, receives the touches.
    """
    mask = len(window.row) - 1
    words = window.words
    final = len(rows) - 1
    newest = window.newest
    row_of = window.row
    readers_of = window.readers
    behind_of = window.behind
    number_of = window.number
    end = begin
    for reader in range(len(bounds) - 1):
        of_reader = word_of(words, reader)
        bit = bit_in(words, of_reader, reader)
        for i in range(bounds[reader], bounds[reader + 1]):
            prefetch(newest, np.int64(numbers[min(i + AHEAD, final)]))
            number = np.uint64(numbers[i])
            before = np.int64(newest[number]) - 1  # the row's last touch, -1 for none in the window
            is_there = (before >= begin) & (before < end)
            # another rank's touch of the step counts for this one too
            at = before if is_there else end
            row_of[at] = rows[i]
            number_of[at] = numbers[i]
            others = np.int64(readers_of[of_reader, at]) if is_there else np.int64(0)
            if len(words) > 1 and not is_there:
                for word in range(len(words)):
                    readers_of[word, at] = 0
            readers_of[of_reader, at] = others | bit
            distance = (end - before) & mask if before >= 0 else 0
            behind_of[at] = behind_of[at] if is_there else distance
            newest[number] = np.int64(at) + 1
            touches[i] = at
            end += not is_there
    return end


@kernel
def split(window: Window, begin: int, end: int, gap: int) -> tuple[Places, Places]:
    """Touches of a complete step whose rows are new, and those that the step before has, too.

    In touches of the step before it is noted who reads the latter next.

    Args:
        window: of all touches.
        begin: index of the step's first touch.
        end: index behind its last one.
        gap: how much lower the number of the first touch of the step before is.
    """
    mask = len(window.row) - 1
    touches = np.empty((2, end - begin), np.int32)  # the new ones, and the others
    num_fresh = 0
    num_again = 0
    behind_of = window.behind
    then_of = window.then
    words = window.words
    for at in range(begin, end):
        for word in range(len(words)):
            then_of[word, at] = 0
        behind = np.int64(behind_of[at])
        # not further back than where the step before begins
        is_again = (behind != 0) & (behind <= at - begin + gap)
        touches[0, num_fresh] = at
        touches[1, num_again] = at
        num_fresh += not is_again
        num_again += is_again
    again = touches[1, :num_again].copy()
    for at in again:
        for word in range(len(words)):
            then_of[word, (at - behind_of[at]) & mask] = window.readers[word, at]
    return touches[0, :num_fresh].copy(), again


@kernel
def count_arrivals(window: Window, site: Site, touches: Places, needed: Ints) -> None:
    """Add to ``needed`` ``[P]`` the slots that the arrival of touches takes on each rank.

    Slots that it frees are subtracted.
    """
    words = window.words
    for at in touches:
        row = np.int64(window.row[at])
        home = home_of(site.bounds, row)
        holder = np.int64(window.holder[window.number[at]])
        source = home if holder == HOME else holder
        owner = owner_of(site, words, window.readers, window.then, at, source, home, row)
        is_borrowed = np.int64(0)  # by the source, which keeps its slot for the step
        for word in range(len(words)):
            borrowers = np.int64(window.readers[word, at]) | always_reading(site, words, word)
            had = bit_in(words, word, source)
            owns = bit_in(words, word, owner)
            taken = slots_taken(borrowers, had, owns, owner == home)
            is_borrowed |= borrowers & had
            for place in range(min(BITS, len(needed) - BITS * word)):
                needed[BITS * word + place] += (taken >> place) & 1
        if owner != source and holder != HOME and is_borrowed == 0:
            needed[source] -= 1


@kernel
def arrive(window: Window, site: Site, slots: Slots, touches: Places) -> tuple[Transfer, Places]:
    """Decide who owns rows in a step, give places to those that come here, and list what travels.

    Returns also the touches that concern this rank: it owns the row, or reads it.
    """
    here = site.rank
    bounds = site.bounds
    words = window.words
    num_words = len(window.words)
    row_of = window.row
    readers_of = window.readers
    then_of = window.then
    owners = window.owner
    borrowed_of = window.borrowed
    number_of = window.number
    place_of = window.place
    holders = window.holder
    first = site.bounds[site.rank]
    size = len(touches)
    final = len(touches) - 1
    own = np.empty(size, np.int32)
    num_own = np.uint64(0)
    held = np.empty(size, np.int32)
    num_held = np.uint64(0)
    taken = np.empty((num_words, size), readers_of.dtype)
    freed = np.empty((num_words, size), readers_of.dtype)
    lists = np.empty((4, size), np.int32)
    lengths = np.zeros(4, np.int64)
    num_moving = np.uint64(0)
    others = np.empty((4, num_words, size), readers_of.dtype)
    leave = np.uint64(0)
    lend = np.uint64(0)
    come = np.uint64(0)
    borrow = np.uint64(0)
    for i in range(size):
        prefetch(holders, np.int64(number_of[touches[min(i + AHEAD, final)]]))
        at = np.uint64(touches[i])
        row = np.int64(row_of[at])
        number = np.uint64(number_of[at])
        home = home_of(bounds, row)
        holder = np.int64(holders[number])
        is_home = holder == HOME
        source = home if is_home else holder
        owner = owner_of(site, words, readers_of, then_of, at, source, home, row)
        is_owner = owner == here
        is_source = source == here
        reads_here = np.int64(0)
        borrowed_from_here = np.int64(0)
        moving = np.int64(0)
        for word in range(num_words):
            # who needs the weights in the step; the owner, who updates, has them by its record
            borrowers = np.int64(readers_of[word, at]) | always_reading(site, words, word)
            owns = bit_in(words, word, owner)
            had = bit_in(words, word, source)
            only_here = bit_in(words, word, here)
            borrowed = borrowers & ~owns
            # a home that is read in place takes no slot
            borrowed_of[word, at] = borrowed & ~(np.int64(is_home) * bit_in(words, word, home))
            taken[word, num_moving] = slots_taken(borrowers, had, owns, owner == home)
            freed[word, num_moving] = had & ~borrowers & ~owns & (np.int64(is_home) - 1)
            others[0, word, leave] = owns
            others[1, word, lend] = borrowed & ~only_here
            others[2, word, come] = had
            others[3, word, borrow] = had
            reads_here |= borrowers & only_here
            borrowed_from_here |= borrowed & ~only_here
            moving |= (owns | borrowers | had) ^ had
        reads = reads_here != 0
        owners[at] = owner
        place_of[at] = row - first
        holders[number] = HOME if owner == home else owner
        held[num_held] = at
        own[num_own] = at
        num_held += np.uint64(holder == here)
        num_own += np.uint64(is_owner | reads)
        # rows that stay where they are, which most do, change no rank's count of slots
        num_moving += np.uint64(moving != 0)
        lists[0, leave] = at
        lists[1, lend] = at
        lists[2, come] = at
        lists[3, borrow] = at
        leave += np.uint64(is_source & (not is_owner))
        lend += np.uint64(is_source & (borrowed_from_here != 0))
        come += np.uint64(is_owner & (not is_source))
        borrow += np.uint64(reads & (not is_owner) & (not is_source))
    _note_places(window, held[:num_held])  # now: they may be given away below
    for word in range(num_words):
        add_bits(taken[word, :num_moving], BITS * word, 1, slots.used)
        add_bits(freed[word, :num_moving], BITS * word, -1, slots.used)
    lengths[0] = leave
    lengths[1] = lend
    lengths[2] = come
    lengths[3] = borrow
    return _list(window, site, slots, lists, others, lengths), own[:num_own].copy()


@kernel
def _note_places(window: Window, held: Places) -> None:
    """Note the slots of records that this rank held, which it alone knows, in their touches."""
    slot_of = window.slot
    number_of = window.number
    final = len(held) - 1
    for i in range(len(held)):
        prefetch(slot_of, np.int64(number_of[held[min(i + AHEAD, final)]]))
        window.place[held[i]] = slot_of[number_of[held[i]]]


@kernel
def _list(
    window: Window, site: Site, slots: Slots, lists: Places, others: Array, lengths: Ints
) -> Transfer:
    """Group what leaves and what comes by rank.

    Places of what leaves are free for what comes in the same message.

    Args:
        window: of all touches.
        site: the rules.
        slots: in use.
        lists: touches ``[4, .]`` of records and weights that leave, and of those that come.
        others: masks ``[4, K, .]`` of the ranks to or from which.
        lengths: how many there are in each list.
    """
    here = site.rank
    first = site.bounds[site.rank]
    num_home = site.num_home
    free = slots.free
    depth = slots.depth[0]
    row_of = window.row
    place_of = window.place
    slot_of = window.slot
    borrowed_of = window.borrowed
    number_of = window.number
    words = window.words
    counts = np.zeros((4, len(site.bounds) - 1), np.int64)
    for kind in range(4):
        for word in range(len(words)):
            add_bits(others[kind, word, : lengths[kind]], BITS * word, 1, counts[kind])
    position = starts_of(counts)
    sums = np.zeros(4, np.int64)
    for kind in range(4):
        for rank in range(counts.shape[1]):
            sums[kind] += counts[kind, rank]
    records_out = np.empty(sums[0], np.int64)
    weights_out = np.empty(sums[1], np.int64)
    records_in = np.empty(sums[2], np.int64)
    weights_in = np.empty(sums[3], np.int64)
    rows_in = np.empty(sums[2], np.int64)
    borrowed_rows_in = np.empty(sums[3], np.int64)
    # The order of the four matters: weights are read from places that leaving records give free,
    # and what comes takes them. All ranks list a message's rows in the order of the touches, so
    # none is named on the wire.
    for i in range(lengths[1]):
        place = place_of[lists[1, i]]
        for word in range(len(words)):
            rest = np.int64(others[1, word, i])
            while rest:
                rank = BITS * word + lowest(rest)
                weights_out[position[1, rank]] = place
                position[1, rank] += 1
                rest &= rest - 1
    for i in range(lengths[0]):
        place = place_of[lists[0, i]]
        rank = lowest_in(words, others[0], i)
        records_out[position[0, rank]] = place
        position[0, rank] += 1
        free[depth] = (
            place  # unless it is a place of its own shard, or is still read here in this step
        )
        depth += (place >= num_home) & (not is_in(words, borrowed_of, lists[0, i], here))
    for i in range(lengths[2]):
        prefetch(slot_of, np.int64(number_of[lists[2, min(i + AHEAD, lengths[2] - 1)]]))
        at = lists[2, i]
        rank = lowest_in(words, others[2], i)
        row = np.int64(row_of[at])
        is_here = (row >= first) & (row < first + num_home)
        depth -= not is_here
        slot = np.int64(free[depth])
        place = row - first if is_here else slot
        slot_of[number_of[at]] = place
        place_of[at] = place
        records_in[position[2, rank]] = place
        rows_in[position[2, rank]] = row
        position[2, rank] += 1
    for i in range(lengths[3]):
        at = lists[3, i]
        rank = lowest_in(words, others[3], i)
        depth -= 1
        place = free[depth]
        place_of[at] = place
        weights_in[position[3, rank]] = place
        borrowed_rows_in[position[3, rank]] = row_of[at]
        position[3, rank] += 1
    slots.depth[0] = depth
    return Transfer(
        records_out, weights_out, records_in, weights_in, counts, rows_in, borrowed_rows_in
    )


@kernel
def places_of(window: Window, touches: Places, places: Ints) -> None:
    """Write where this rank reads each of its touches."""
    for i in range(len(touches)):
        places[i] = window.place[touches[i]]


@kernel
def forget(window: Window, begin: int, end: int) -> None:
    """Rows of a step are in nobody's window, and at home."""
    for at in range(begin, end):
        window.newest[window.number[at]] = 0
        window.holder[window.number[at]] = HOME


@kernel
def move(window: Window, larger: Window, begin: int, end: int, to: int) -> None:
    """Copy a step's touches to index ``to`` of a larger ring; steps are moved in their order."""
    shift = to - begin
    for at in range(begin, end):
        larger.row[at + shift] = window.row[at]
        larger.number[at + shift] = window.number[at]
        larger.behind[at + shift] = window.behind[at]
        larger.owner[at + shift] = window.owner[at]
        for word in range(len(window.words)):
            larger.readers[word, at + shift] = window.readers[word, at]
            larger.then[word, at + shift] = window.then[word, at]
            larger.borrowed[word, at + shift] = window.borrowed[word, at]
        larger.place[at + shift] = window.place[at]
        window.newest[window.number[at]] = at + shift + 1
