"""A hash table from int64 keys to rows, by open addressing in Robin Hood's order (Celis 1986).

A slot holds 32 bits of a key's hash above its row + 1, and 0 where nobody is. A key lies at the
slot that its hash names, its home, or behind it; of those that want a slot, the one that is farther
from home has it. So the keys behind each other are in the order of their homes: a search ends where
a key nearer to its home begins, hardly longer for keys that are absent, and few keys lie far away.
What leaves gives its slot to those behind it that are not at home, so a table that is used for ever
stays as quick as a new one. The last slot is followed by the first.

A row's entry has the key itself and when and how often it was seen, beside each other in one cache
line; a key whose 32 bits agree is looked for there. Any place is right for any key, searches only
take longer where many hashes are alike. Each table's hash has a random seed, so that strangers
cannot choose ids whose hashes are; no row depends on it.

C rows, S slots (S > C), V keys. Places are unsigned: for signed ones numba adds a test for negative
indices, which took a fifth of the time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.arrays import Ints
from pibroch.kernels.bits import lowest
from pibroch.kernels.dedupe.numba import dedupe
from pibroch.kernels.memory import numbers_at, prefetch
from pibroch.kernels.policy import kernel

BLOCK = 32  # keys that are looked for together
AHEAD = 16  # keys between the one that is put or taken and the one whose slot is fetched
ROWS_PER_SLOT = 0.5  # at most: at 0.6 inserting takes a third longer, at 0.4 nothing is gained
MOST_ROWS = (1 << 31) - 1
MOST_COUNT = (1 << 31) - 1  # counts stay there
MOST_STEP = (1 << 31) - 1  # the half of an entry that is a step is signed
MIX1 = np.uint64(0xBF58476D1CE4E5B9)
MIX2 = np.uint64(0x94D049BB133111EB)
HALF = np.uint64(32)
LOW_HALF = np.uint64(0xFFFFFFFF)
ONE = np.uint64(1)


class KeyTable(NamedTuple):
    """Rows by key.

    Attributes:
        slots: uint64 ``[S]``: upper half of the key's hash, row + 1; 0 for an empty slot.
        entries: int64 ``[C, 2]`` by row: key; last step in the upper half, count in the lower one.
            Steps begin with 1, so the second number is 0 for a free row alone.
        free: int64 ``[C / 64]``, a bit for each row, set where it is free.
        counts: int64 ``[3]``: rows in use; a word of ``free`` before which all are 0; the seed of
            the hash.
    """

    slots: NDArray[np.uint64]
    entries: Ints
    free: Ints
    counts: Ints


@kernel
def mixed(key: Any) -> Any:
    """64 bits that look random, by the finaliser of SplitMix64 (Steele et al. 2014), as uint64."""
    z = np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * MIX1
    z = (z ^ (z >> np.uint64(27))) * MIX2
    return z ^ (z >> np.uint64(31))


@kernel
def hash_of(key: Any, seed: Any) -> Any:
    """32 bits of a key, as uint64, by a table's seed."""
    return mixed(np.uint64(key) ^ np.uint64(seed)) >> HALF


@kernel
def home_of(hash_: Any, num_slots: Any) -> Any:
    """The slot that a hash names, all uint64: the hash as a fraction of all slots."""
    return (hash_ * num_slots) >> HALF


@kernel
def distance_of(slot: Any, at: Any, num_slots: Any) -> Any:
    """How far behind its home what lies at slot ``at`` lies, all uint64."""
    home = home_of(slot >> HALF, num_slots)
    if at >= home:
        return at - home
    return at + num_slots - home


@kernel
def last_halving(step: int, half_life: int) -> int:
    """The last step up to ``step`` in which counts were halved, 0 for none."""
    return step - step % half_life if half_life > 0 else 0


@kernel
def decayed(count: int, last: int, halving: int, half_life: int) -> int:
    """A count that is halved at each multiple of ``half_life`` steps after step ``last``.

    ``halving`` is the last of them, see :func:`last_halving`. Most counts are 0 before all are
    done, and a division would take longer.

    >>> decayed(9, 3, 8, 4), decayed(9, 4, 8, 4), decayed(9, 8, 8, 4)
    (2, 4, 9)
    """
    while count > 0 and last < halving:
        count >>= 1
        halving -= half_life
    return count


@kernel
def visit(
    table: KeyTable,
    keys: Ints,
    counts: NDArray[np.int32],
    step: int,
    half_life: int,
    rows: Ints,
    misses: NDArray[np.int32],
    start: int,
    stop: int,
) -> int:
    """Write the row of each of ``keys[start:stop]``, -1 for those that are absent.

    In a step, their entries take over when and how often they were seen.

    Branches depend on little that differs from key to key: slots are read in rounds, one of each
    key that is not found yet, and hits and misses are listed before hits are written. Half of the
    time went into wrong guesses otherwise.

    Args:
        table: only read where ``step`` is 0, then by several threads at a time.
        keys: ``[V]``, may repeat.
        counts: ``[V]``, how often each was seen, or empty for once; not read where ``step`` is 0.
        step: that is now, or 0.
        half_life: counts are halved at each multiple of so many steps; 0 for never.
        rows: ``[V]``.
        misses: ``[V]``, receives the positions of absent keys, rising; not where ``step`` is 0.
        start: of the range.
        stop: of the range.

    Returns:
        How many are absent.
    """
    slots = table.slots
    entries = table.entries
    seed = table.counts[2]
    num_slots = np.uint64(len(slots))
    hashes = np.empty(BLOCK, np.uint64)
    places = np.empty(BLOCK, np.uint64)
    next_hashes = np.empty(BLOCK, np.uint64)
    next_places = np.zeros(BLOCK, np.uint64)
    some = np.empty(BLOCK, np.uint64)
    num_misses = np.uint64(0)
    halving = last_halving(step, half_life)
    is_counted = len(counts) > 0
    first = np.uint64(start)
    num = np.uint64(0)
    num_next = np.uint64(0)
    for begin in range(start - BLOCK, stop + BLOCK, BLOCK):
        # slots of the next block are fetched while this one's are read, entries of this one while
        # those of the block before are
        first_before = first
        num_before = num
        first = np.uint64(max(begin, start))
        num = num_next
        hashes, next_hashes = next_hashes, hashes
        places, next_places = next_places, places
        next_first = np.uint64(begin + BLOCK)
        num_next = np.uint64(max(0, min(BLOCK, stop - begin - BLOCK)))
        for i in range(num_next):  # apart, for several keys in one instruction
            next_hashes[i] = hash_of(keys[next_first + i], seed)
            next_places[i] = home_of(next_hashes[i], num_slots)
        for i in range(num, num_next):
            prefetch(slots, np.int64(next_places[i]))
        num_left = np.uint64(0)
        for i in range(num):  # at home most are found, or known to be absent
            prefetch(slots, np.int64(next_places[i]))
            slot = slots[places[i]]
            is_same = slot >> HALF == hashes[i]
            row = np.int64(slot & LOW_HALF) - 1 if is_same else -1
            rows[first + i] = row
            prefetch(entries, 2 * max(row, 0))
            some[num_left] = i
            num_left += np.uint64(0) if is_same | (slot == 0) else ONE
        distance = ONE
        while num_left > 0:  # each time one slot of those that are not found yet
            num_read = num_left
            num_left = np.uint64(0)
            for k in range(num_read):
                i = some[k]
                at = places[i] + ONE
                at = np.uint64(0) if at == num_slots else at
                places[i] = at
                slot = slots[at]
                is_same = slot >> HALF == hashes[i]
                is_last = is_same | (slot == 0) | (distance_of(slot, at, num_slots) < distance)
                row = np.int64(slot & LOW_HALF) - 1 if is_same else -1
                rows[first + i] = row
                prefetch(entries, 2 * max(row, 0))
                some[num_left] = i
                num_left += np.uint64(0) if is_last else ONE
            distance += ONE
        for position in range(first_before, first_before + num_before):
            key = keys[position]
            row = rows[position]
            if row >= 0 and entries[np.uint64(row), 0] != key:
                row = search(slots, entries, hash_of(key, seed), key)
                rows[position] = row
            if step > 0:  # an absent key leaves the first row's entry as it is
                place = np.uint64(max(row, 0))
                seen = entries[place, 1]
                more = int(counts[position]) if is_counted else 1
                again = seen_again(seen, more, step, halving, half_life)
                entries[place, 1] = again if row >= 0 else seen
                misses[num_misses] = position
            num_misses += ONE if row < 0 else np.uint64(0)
    return int(np.int64(num_misses))  # a team of threads takes no unsigned number


@kernel
def seen_again(seen: int, more: int, step: int, halving: int, half_life: int) -> int:
    """The second number of an entry whose key was seen ``more`` times in a step."""
    count = decayed(seen & np.int64(0xFFFFFFFF), seen >> 32, halving, half_life)
    return (step << 32) | min(count + more, MOST_COUNT)


@kernel
def visit_again(
    entries: Ints,
    keys: Ints,
    counts: NDArray[np.int32],
    step: int,
    half_life: int,
    rows: Ints,
    first_row: int,
    misses: NDArray[np.int32],
) -> int:
    """As :func:`visit` in a step, where another table that was like this one has learned it.

    Nothing is searched: the row that a key has there after the step is the one that it has here, or
    it has none yet.

    Args:
        entries: of this table.
        keys: ``[V]``.
        counts: ``[V]``, or empty.
        step: that is now.
        half_life: see :func:`visit`.
        rows: ``[V]``, after the step, less than ``first_row`` for none.
        first_row: the number of the table's first row.
        misses: ``[V]``, receives the positions of absent keys, rising.

    Returns:
        How many are absent.
    """
    num_misses = 0
    halving = last_halving(step, half_life)
    is_counted = len(counts) > 0
    final = len(keys) - 1
    for i in range(len(keys)):
        prefetch(entries, 2 * max(rows[min(i + AHEAD, final)] - first_row, 0))
        row = np.uint64(max(rows[i] - first_row, 0))
        seen = entries[row, 1]
        if rows[i] >= first_row and seen != 0 and entries[row, 0] == keys[i]:
            more = int(counts[i]) if is_counted else 1
            entries[row, 1] = seen_again(seen, more, step, halving, half_life)
        else:
            misses[num_misses] = i
            num_misses += 1
    return num_misses


@kernel
def visit_tables(
    places: Ints,
    keys: Ints,
    counts: NDArray[np.int32],
    bounds: Ints,
    half_lives: Ints,
    rows: Ints,
    known: bool,
    misses: NDArray[np.int32],
    num_misses: Ints,
    slots: NDArray[np.uint64],
    start: int,
    stop: int,
) -> None:
    """A step of the tables ``start`` to ``stop``, each with keys of its own.

    Args:
        places: ``[T, 8]``, of each table: see :func:`pibroch.kernels.key_table.place_of`.
        keys: ``[V]``, of one table after the other.
        counts: ``[V]``, how often each was seen, or empty for once.
        bounds: ``[T + 1]``, of each table's keys.
        half_lives: ``[T]``, see :func:`visit`.
        rows: ``[V]``, receives those of each key, or has them, see :func:`visit_again`.
        known: whether it has them.
        misses: ``[V]``, receives among each table's keys the positions of absent ones.
        num_misses: ``[T]``, receives how many there are.
        slots: empty; for its type.
        start: of the tables.
        stop: of the tables.
    """
    for number in range(start, stop):
        begin = bounds[number]
        end = bounds[number + 1]
        place = places[number]
        entries = numbers_at(keys, place[2], 2 * place[3]).reshape((place[3], 2))
        totals = numbers_at(keys, place[4], 3)
        totals[0] += 1
        step = totals[0]
        own = counts[begin:end] if len(counts) > 0 else counts
        num = end - begin
        if len(counts) > 0:
            num = 0
            for count in own:
                num += count
        some = misses[begin:end]
        if known:
            absent = visit_again(
                entries, keys[begin:end], own, step, half_lives[number], rows[begin:end],
                place[5], some,
            )  # fmt: skip
        else:
            table = KeyTable(
                numbers_at(slots, place[0], place[1]),
                entries,
                keys[:0],
                numbers_at(keys, place[7], 3),
            )
            absent = visit(
                table, keys[begin:end], own, step, half_lives[number], rows[begin:end], some,
                0, end - begin,
            )  # fmt: skip
        num_misses[number] = absent
        totals[1] += num
        totals[2] += num
        for i in range(absent):
            totals[2] -= own[some[i]] if len(counts) > 0 else 1


@kernel
def search(slots: NDArray[np.uint64], entries: Ints, hash_: Any, key: int) -> int:
    """The row of a key, -1 when it is absent, where another key with its 32 bits is found first."""
    num_slots = np.uint64(len(slots))
    at = home_of(hash_, num_slots)
    distance = np.uint64(0)
    while slots[at] != 0 and distance_of(slots[at], at, num_slots) >= distance:
        if slots[at] >> HALF == hash_:
            row = int(slots[at] & LOW_HALF) - 1
            if entries[row, 0] == key:
                return row
        at += ONE
        if at == num_slots:
            at = np.uint64(0)
        distance += ONE
    return -1


@kernel
def put(slots: NDArray[np.uint64], hash_: Any, row: int) -> None:
    """Enter a row whose key is absent.

    Each slot on the way is written, so that no branch depends on who is farther from home.
    """
    num_slots = np.uint64(len(slots))
    moved = (hash_ << HALF) | np.uint64(row + 1)
    at = home_of(hash_, num_slots)
    distance = np.uint64(0)
    while True:
        slot = slots[at]
        other = distance_of(slot, at, num_slots)
        goes_on = (slot != 0) & (other < distance)
        slots[at] = moved if goes_on or slot == 0 else slot
        if slot == 0:
            break
        moved = slot if goes_on else moved
        distance = (other if goes_on else distance) + ONE
        at += ONE
        if at == num_slots:
            at = np.uint64(0)


@kernel
def insert(table: KeyTable, keys: Ints, counts: Ints, step: int, rows: Ints) -> None:
    """Give distinct keys that are absent the lowest free rows, in their order.

    Args:
        table: with as many free rows at least.
        keys: ``[N]``.
        counts: ``[N]``, how often each was seen.
        step: in which they were.
        rows: ``[N]``, receives their rows.
    """
    slots = table.slots
    entries = table.entries
    free = table.free
    seed = table.counts[2]
    num_slots = np.uint64(len(slots))
    hashes = np.empty(AHEAD, np.uint64)
    for number in range(min(AHEAD, len(keys))):
        hashes[number] = hash_of(keys[number], seed)
        prefetch(slots, np.int64(home_of(hashes[number], num_slots)))
    word = np.uint64(table.counts[1])
    for number in range(len(keys)):
        i = np.uint64(number)
        hash_ = hashes[i % np.uint64(AHEAD)]
        if number + AHEAD < len(keys):
            later = hash_of(keys[i + np.uint64(AHEAD)], seed)
            hashes[i % np.uint64(AHEAD)] = later
            prefetch(slots, np.int64(home_of(later, num_slots)))
        while free[word] == 0:
            word += ONE
        row = word * np.uint64(64) + np.uint64(lowest(int(free[word])))
        free[word] &= free[word] - 1
        rows[i] = row
        entries[row, 0] = keys[i]
        entries[row, 1] = (step << 32) | min(counts[i], MOST_COUNT)
        put(slots, hash_, np.int64(row))
    table.counts[0] += len(keys)
    table.counts[1] = word


@kernel
def admit_tables(
    places: Ints,
    keys: Ints,
    counts: NDArray[np.int32],
    bounds: Ints,
    wanted: NDArray[np.bool_],
    rows: Ints,
    misses: NDArray[np.int32],
    num_misses: Ints,
    begins: Ints,
    fresh_keys: Ints,
    fresh_rows: Ints,
    num_fresh: Ints,
    slots: NDArray[np.uint64],
    start: int,
    stop: int,
) -> None:
    """Give the absent keys of the tables ``start`` to ``stop`` rows, after :func:`visit_tables`.

    Args:
        places: ``[T, 8]``, see :func:`pibroch.kernels.key_table.place_of`.
        keys: ``[V]``, of one table after the other.
        counts: ``[V]``, how often each was seen, or empty for once.
        bounds: ``[T + 1]``, of each table's keys.
        wanted: ``[T]``, which tables are meant.
        rows: ``[V]``, receives those of absent keys.
        misses: ``[V]``, among each table's keys the positions of absent ones.
        num_misses: ``[T]``, how many there are.
        begins: ``[T]``, where each table's fresh keys go.
        fresh_keys: receives the distinct keys that were absent, rising.
        fresh_rows: receives their rows.
        num_fresh: ``[T]``, receives how many there are, -1 where nothing was done: for tables that
            are not meant, and those that may have fewer free rows.
        slots: empty; for its type.
        start: of the tables.
        stop: of the tables.
    """
    for number in range(start, stop):
        num = num_misses[number]
        place = places[number]
        in_use = numbers_at(keys, place[7], 3)
        num_fresh[number] = -1
        if not wanted[number] or place[3] - in_use[0] < num:
            continue
        num_fresh[number] = 0
        if num == 0:
            continue
        table = KeyTable(
            numbers_at(slots, place[0], place[1]),
            numbers_at(keys, place[2], 2 * place[3]).reshape((place[3], 2)),
            numbers_at(keys, place[6], -(-place[3] // 64)),
            in_use,
        )
        own = keys[bounds[number] : bounds[number + 1]]
        own_counts = counts[bounds[number] : bounds[number + 1]] if len(counts) > 0 else counts
        own_rows = rows[bounds[number] : bounds[number + 1]]
        begin = begins[number]
        new = fresh_keys[begin : begin + num]
        new_rows = fresh_rows[begin : begin + num]
        segments = np.empty(num + 1, np.int32)
        order = np.empty(num, np.int32)
        found = dedupe(own, misses[bounds[number] :], new, segments, order, 0, num)
        segments[found] = num
        totals = np.empty(found, np.int64)
        for i in range(found):
            totals[i] = segments[i + 1] - segments[i]
            if len(counts) > 0:
                totals[i] = 0
                for k in range(segments[i], segments[i + 1]):
                    totals[i] += own_counts[order[k]]
        counters = numbers_at(keys, place[4], 4)
        insert(table, new[:found], totals, counters[0], new_rows)
        for i in range(found):
            new_rows[i] += place[5]
            for k in range(segments[i], segments[i + 1]):
                own_rows[order[k]] = new_rows[i]
        counters[3] += found
        num_fresh[number] = found


@kernel
def remove(table: KeyTable, rows: Ints, keys: Ints) -> None:
    """Take the keys of distinct rows that are in use out; the rows are free then.

    Args:
        table: is written to.
        rows: ``[N]``, best rising.
        keys: ``[N]``, receives the keys.
    """
    slots = table.slots
    entries = table.entries
    free = table.free
    num_slots = np.uint64(len(slots))
    counts = table.counts
    hashes = np.empty(AHEAD, np.uint64)
    final = len(rows) - 1
    for number in range(-AHEAD if len(rows) > 0 else 0, len(rows)):
        i = np.uint64(number + AHEAD)
        prefetch(entries, 2 * rows[min(number + 2 * AHEAD, final)])
        hash_ = hashes[i % np.uint64(AHEAD)]
        if number + AHEAD <= final:
            keys[i] = entries[np.uint64(rows[i]), 0]
            later = hash_of(keys[i], counts[2])
            hashes[i % np.uint64(AHEAD)] = later
            prefetch(slots, np.int64(home_of(later, num_slots)))
        if number < 0:
            continue
        row = np.uint64(rows[number])
        wanted = (hash_ << HALF) | (row + ONE)
        at = home_of(hash_, num_slots)
        while slots[at] != wanted:
            at += ONE
            if at == num_slots:
                at = np.uint64(0)
        while True:
            after = at + ONE
            if after == num_slots:
                after = np.uint64(0)
            slot = slots[after]
            if slot == 0 or distance_of(slot, after, num_slots) == 0:
                break
            slots[at] = slot
            at = after
        slots[at] = 0
        entries[row, 0] = 0
        entries[row, 1] = 0
        free[row >> np.uint64(6)] |= np.int64(1) << np.int64(row & np.uint64(63))
        counts[1] = min(counts[1], np.int64(row >> np.uint64(6)))
    counts[0] -= len(rows)


@kernel
def rebuild(table: KeyTable) -> None:
    """Make slots, free rows and counts from the entries."""
    slots = table.slots
    entries = table.entries
    free = table.free
    seed = table.counts[2]
    num_slots = np.uint64(len(slots))
    for at in range(len(slots)):
        slots[at] = 0
    for word in range(len(free)):
        free[word] = 0
    used = 0
    final = len(entries) - 1
    for row in range(len(entries)):
        later = entries[min(row + AHEAD, final), 0]
        prefetch(slots, np.int64(home_of(hash_of(later, seed), num_slots)))
        if entries[row, 1] == 0:
            free[row >> 6] |= np.int64(1) << (row & 63)
        else:
            put(slots, hash_of(entries[row, 0], seed), row)
            used += 1
    table.counts[0] = used
    table.counts[1] = 0


@kernel
def score_of(seen: int, by_count: bool, halving: int, half_life: int) -> int:
    """Of the second number of an entry: its last step, below its decayed count where that counts.

    >>> score_of((7 << 32) | 5, False, 0, 0)
    7
    >>> score_of((7 << 32) | 5, True, 8, 4) == (2 << 32) | 7
    True
    """
    last = seen >> 32
    if by_count:
        return (decayed(seen & np.int64(0xFFFFFFFF), last, halving, half_life) << 32) | last
    return last


@kernel
def scores_of(
    entries: Ints, rows: Ints, by_count: bool, half_life: int, step: int, scores: Ints
) -> None:
    """Write the scores of some rows, both ``[R]``."""
    halving = last_halving(step, half_life)
    for i in range(len(rows)):
        scores[i] = score_of(entries[rows[i], 1], by_count, halving, half_life)


@kernel
def scan(
    entries: Ints,
    given: Ints,
    by_count: bool,
    half_life: int,
    step: int,
    low: int,
    high: int,
    below: NDArray[np.int32],
    within: NDArray[np.int32],
) -> tuple[int, int, int]:
    """Find the rows with the least scores among those that were not seen in this step.

    Args:
        entries: ``[C, 2]``.
        given: scores by row ``[C]``; empty where they are those of :func:`score_of`.
        by_count: see :func:`score_of`.
        half_life: see :func:`visit`.
        step: that is now.
        low: a score.
        high: a score.
        below: receives the rows whose score is below ``low``, rising; as many as there is room for.
        within: ``[C]``, receives those whose score is from ``low`` to ``high``, rising.

    Returns:
        How many rows are below, within, and among how many.
    """
    num_below = 0
    num_within = 0
    num_rows = 0
    halving = last_halving(step, half_life)
    for row in range(len(entries)):
        seen = entries[row, 1]
        if seen == 0 or seen >> 32 == step:
            continue
        num_rows += 1
        score = given[row] if len(given) else score_of(seen, by_count, halving, half_life)
        if score < low:
            if num_below < len(below):
                below[num_below] = row
            num_below += 1
        elif score <= high:
            within[num_within] = row
            num_within += 1
    return num_below, num_within, num_rows


@kernel
def count_distances(table: KeyTable, counts: Ints) -> None:
    """Count by the number of slots that a search for it reads the keys of a table.

    Args:
        table: is read.
        counts: ``[L]``, is added to; longer searches are counted with the longest.
    """
    num_slots = np.uint64(len(table.slots))
    for at in range(len(table.slots)):
        if table.slots[at] != 0:
            length = int(distance_of(table.slots[at], np.uint64(at), num_slots)) + 1
            counts[min(length, len(counts) - 1)] += 1
