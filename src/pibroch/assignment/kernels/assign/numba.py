"""Samples to the ranks where their rows are: numbering a batch's rows, placing, counting.

Shape legend: B samples of a global batch, F features, V ids, U distinct rows of the batch, W ranks,
L lanes, P shards.

Ids are walked feature by feature, as they lie: a feature's hot rows stay near, and arrays of a
power of two of samples do not fall upon the same places of a processor's cache.

Rows are remembered in a table of lines of ``LINE`` words, one line of a processor's cache each:
four keys, then of each key a word ``step << 32 | number``. The number is that of the row in the
batch while this is entered, and afterwards the rank that has the record, plus one. A row that finds
no place takes that of the one in its line that was read longest ago, of several the one of the
least key. So what is remembered does not depend on what was there before a restart.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.arrays import Ints
from pibroch.kernels.bits import count, lowest
from pibroch.kernels.memory import prefetch
from pibroch.kernels.policy import kernel

LINE = 8
WAYS = LINE // 2
NOBODY = -1
ORDERS = 256  # regrets that are told apart at most where samples are put in order
NUMBERS = np.int64((1 << 32) - 1)
LINES_AHEAD = 16  # ids whose lines are fetched before they are needed


class Lanes(NamedTuple):
    """Whose rows the features read, and where these are at home.

    Attributes:
        of_feature: int64 ``[F]``, lane of each.
        first_key: int64 ``[L]``, key of the row of address 0; keys are above 0.
        bounds: int64 ``[L, P + 1]``, first address of each shard.
        num_everywhere: int64 ``[L]``, rows that each rank has, the first ones: nobody sends them.
        weight: int64 ``[L]``, what a row of the lane counts.
    """

    of_feature: Ints
    first_key: Ints
    bounds: Ints
    num_everywhere: Ints
    weight: Ints


class Room(NamedTuple):
    """A batch as it is entered.

    Attributes:
        rows: int32 ``[V]``, number of each id's row, or ``NOBODY`` where every rank has it.
        reads: int32 ``[V]``, ids of each row.
        where: int16 ``[V]``, the rank that has its record, or ``NOBODY``.
        home: int16 ``[V]``, likewise the rank of its home.
        fetch: int32 ``[V]``, cost of reading it on another rank, once.
        share: int32 ``[V]``, cost of each rank more that reads it.
        address: int64 ``[V]``.
        slot: int64 ``[V]``, its word in the table.
        shared: int32 ``[V + 1]``, for :func:`place`.
    """

    rows: NDArray[np.int32]
    reads: NDArray[np.int32]
    where: NDArray[np.int16]
    home: NDArray[np.int16]
    fetch: NDArray[np.int32]
    share: NDArray[np.int32]
    address: Ints
    slot: Ints
    shared: NDArray[np.int32]


class Rules(NamedTuple):
    """By which samples are placed.

    Attributes:
        price: int64 ``[W, W]``, of a row's way from a rank to another, 0 to itself.
        passes: how often each sample is looked at once more after it was placed.
        most_reads: rows that more ids are of are left aside: all ranks read them anyway.
        sharing: what a rank more that reads a row counts, in its ``share``.
    """

    price: Ints
    passes: int
    most_reads: int
    sharing: int


@kernel
def line_of(table: Ints, key: int) -> np.uint64:
    """Where the line of a key begins, in words."""
    return (np.uint64(key >> 2 ^ key >> 23) & np.uint64(len(table) - 1)) * np.uint64(LINE)


@kernel
def slot_of(words: Ints, line: np.uint64, key: int) -> np.uint64:
    """The word of a key in its line, or the one that it may take."""
    ways = np.uint64(WAYS)
    for slot in range(line + ways, line + ways + ways):
        if words[slot - ways] == key:
            return np.uint64(slot)
    chosen = line + ways
    for slot in range(line + ways, line + ways + ways):
        step = words[slot] >> 32
        oldest = words[chosen] >> 32
        is_before = step == oldest and words[slot - ways] < words[chosen - ways]
        if step < oldest or is_before:
            chosen = np.uint64(slot)
    return chosen


@kernel
def enter(
    table: Ints,
    now: int,
    horizon: int,
    addresses: Ints,
    offsets: Ints,
    lanes: Lanes,
    num_ranks: int,
    room: Room,
) -> np.int64:
    """Number the rows of a batch and look up where they are.

    Args:
        table: what is known of rows, ``[N, LINE]``; N a power of two. Zeros at first.
        now: number of the step.
        horizon: a row that no step read for longer is at home; 0 where rows never leave.
        addresses: of the ids in their lanes, ``[V]``.
        offsets: of the bags, feature by feature, ``[F * B + 1]``.
        lanes: of the features.
        num_ranks: W; shards beyond are nobody's.
        room: to be filled.

    Returns:
        U.
    """
    num_features = len(lanes.of_feature)
    num_samples = (len(offsets) - 1) // max(1, num_features)
    words = table.reshape(-1)
    rows = room.rows  # not looked up in the loop, a fifth of its time
    reads = room.reads
    num_rows = np.uint64(0)
    for feature in range(num_features):
        lane = lanes.of_feature[feature]
        first_key = lanes.first_key[lane]
        num_everywhere = lanes.num_everywhere[lane]
        weight = lanes.weight[lane]
        bounds = lanes.bounds[lane]
        begin = np.uint64(offsets[feature * num_samples])
        end = np.uint64(offsets[(feature + 1) * num_samples])
        for position in range(begin, end):
            ahead = min(position + np.uint64(LINES_AHEAD), end - np.uint64(1))
            prefetch(table, np.int64(line_of(table, first_key + addresses[ahead])))
            address = addresses[position]
            if address < num_everywhere:
                rows[position] = NOBODY
                continue
            key = first_key + address
            line = line_of(table, key)
            slot = slot_of(words, line, key)
            key_slot = slot - np.uint64(WAYS)
            if words[key_slot] != key:
                if words[slot] >> 32 == now:  # rare: it counts as another row of its line
                    slot = line + np.uint64(WAYS + (key & (WAYS - 1)))
                else:
                    words[key_slot] = key
                    words[slot] = 0
            step = words[slot] >> 32
            row = np.uint64(words[slot] & NUMBERS)
            if step != now:
                home = NOBODY
                for shard in range(num_ranks):
                    if bounds[shard] <= address < bounds[shard + 1]:
                        home = shard
                is_away = step > 0 and now - step <= horizon
                room.home[num_rows] = home
                room.where[num_rows] = np.int64(row) - 1 if is_away else home
                # where rows never leave the way back is a gradient's
                room.fetch[num_rows] = weight if horizon > 0 else 2 * weight
                room.share[num_rows] = 2 * weight
                room.address[num_rows] = address
                room.slot[num_rows] = slot
                reads[num_rows] = 0
                words[slot] = now << 32 | np.int64(num_rows)
                row = num_rows
                num_rows += np.uint64(1)
            reads[row] += 1
            rows[position] = row
    return np.int64(num_rows)


@kernel
def in_order(regret: Ints, order: Ints) -> None:
    """Write the samples to ``order`` ``[B]``, by falling regret; equals stay in their order."""
    most = np.int64(0)
    for sample in range(len(regret)):
        most = max(most, regret[sample])
    shift = np.int64(0)
    while most >> shift >= ORDERS:
        shift += 1
    begin = np.zeros(ORDERS + 1, np.int64)
    for sample in range(len(regret)):
        begin[1 + ((most - regret[sample]) >> shift)] += 1
    for group in range(ORDERS):
        begin[group + 1] += begin[group]
    for sample in range(len(regret)):
        group = (most - regret[sample]) >> shift
        order[begin[group]] = sample
        begin[group] += 1


@kernel
def regret_of(cost: Ints) -> np.int64:
    """How much more the second best rank costs than the best."""
    best = np.int64(1) << 62
    second = np.int64(1) << 62
    for rank in range(len(cost)):
        if cost[rank] < best:
            second = best
            best = cost[rank]
        elif cost[rank] < second:
            second = cost[rank]
    return second - best


@kernel
def choose(
    room: Room,
    num_rows: int,
    offsets: Ints,
    price: Ints,
    most_reads: int,
    first: Ints,
    end: Ints,
    alone: Ints,
    row_of: NDArray[np.int32],
) -> int:
    """Sort out by rows what samples cost.

    Args:
        room: of the batch.
        num_rows: U.
        offsets: of the bags, feature by feature, ``[F * B + 1]``.
        price: ``[W + 1, W + 1]``, see :func:`place`.
        most_reads: see :class:`Rules`.
        first: ``[B]``, to be filled: where each sample's numbers of shared rows begin in
            ``room.shared``.
        end: ``[B]``, to be filled: where they end.
        alone: ``[B, W]``, zeros; to be filled: what a sample costs by rows that nobody else reads.
        row_of: ``[U]``, to be filled: rows of the batch by numbers of shared rows.

    Returns:
        Number of shared rows.
    """
    num_samples, num_ranks = alone.shape
    num_features = (len(offsets) - 1) // max(1, num_samples)
    rows = room.rows
    shared = room.shared
    sample_of = np.empty(num_rows, np.int32)  # the last one that reads a row
    number_of = np.empty(num_rows, np.int32)  # number of a shared row, else a negative one
    num_shared = 0
    for row in range(num_rows):
        reads = room.reads[row]
        is_shared = (reads > 1) & (reads <= most_reads)
        at_rank = room.where[row] if room.where[row] >= 0 else num_ranks
        number_of[row] = num_shared if is_shared else (-2 - at_rank if reads == 1 else -1)
        row_of[num_shared] = row
        num_shared += is_shared
    end[:] = 0
    for feature in range(num_features):
        for sample in range(num_samples):
            bag = feature * num_samples + sample
            end[sample] += offsets[bag + 1] - offsets[bag]
    num_before = 0
    for sample in range(num_samples):
        num_here = end[sample]
        first[sample] = num_before
        end[sample] = num_before
        num_before += num_here
    for feature in range(num_features):
        for sample in range(num_samples):
            bag = feature * num_samples + sample
            for position in range(np.uint64(offsets[bag]), np.uint64(offsets[bag + 1])):
                row = rows[position]
                if row < 0:
                    continue
                number = number_of[np.uint64(row)]
                at = np.uint64(end[sample])
                shared[at] = number  # without a branch, that would be taken at random
                end[sample] = at + np.uint64(number >= 0)
                sample_of[np.uint64(row)] = sample
    for row in range(num_rows):
        if number_of[row] < -1:
            where = np.uint64(-2 - number_of[row])
            for rank in range(num_ranks):
                alone[np.uint64(sample_of[row]), rank] += room.fetch[row] * price[where, rank]
    return num_shared


@kernel
def place(
    room: Room,
    num_rows: int,
    offsets: Ints,
    sizes: Ints,
    rules: Rules,
    ranks: NDArray[np.int16],
) -> None:
    """Write a rank for each sample to ``ranks`` ``[B]``, ``sizes[r]`` samples on rank r.

    See :func:`pibroch.assignment.kernels.assign.naive.place`, which means the same.
    """
    num_samples = len(ranks)
    num_ranks = len(sizes)
    # one rank more, from which all ways are free: nobody
    price = np.zeros((num_ranks + 1, num_ranks + 1), np.int64)
    price[:num_ranks, :num_ranks] = rules.price
    first = np.empty(num_samples, np.int64)
    end = np.empty(num_samples, np.int64)
    alone = np.zeros((num_samples, num_ranks), np.int64)
    row_of = np.empty(num_rows + 1, np.int32)
    num_shared = choose(room, num_rows, offsets, price, rules.most_reads, first, end, alone, row_of)
    shared = room.shared
    where_of = np.empty(num_shared, np.int16)
    fetch_of = np.empty(num_shared, np.int32)
    share_of = np.empty(num_shared, np.int32)
    for number in range(num_shared):
        where = room.where[row_of[number]]
        where_of[number] = where if where >= 0 else num_ranks
        fetch_of[number] = room.fetch[row_of[number]]
        share_of[number] = rules.sharing * room.share[row_of[number]]
    regret = np.empty(num_samples, np.int64)
    order = np.empty(num_samples, np.int64)
    cost = np.empty(num_ranks + 1, np.int64)
    left = np.empty(num_ranks, np.int64)
    last = np.full(num_shared, -1, np.int32)
    kept = np.uint64(0)
    for sample in range(num_samples):
        ranks[sample] = NOBODY
        cost[:num_ranks] = alone[sample]
        begin = np.uint64(first[sample])
        first[sample] = kept
        for edge in range(begin, np.uint64(end[sample])):
            row = np.uint64(shared[edge])
            is_first = last[row] != sample
            last[row] = sample
            shared[kept] = row
            kept += np.uint64(is_first)
            fetch = fetch_of[row] * is_first
            for rank in range(num_ranks):
                cost[rank] += fetch * price[np.uint64(where_of[row]), rank]
        end[sample] = kept
        regret[sample] = regret_of(cost[:num_ranks])
    num_readers = np.zeros((num_shared, num_ranks), np.int32)
    readers = np.zeros(num_shared, np.int64)  # a bit a rank
    one = np.int64(1)
    for _ in range(1 + rules.passes):
        in_order(regret, order)
        left[:] = sizes
        for turn in range(num_samples):
            sample = order[turn]
            before = ranks[sample]
            cost[:num_ranks] = alone[sample]
            for edge in range(np.uint64(first[sample]), np.uint64(end[sample])):
                row = np.uint64(shared[edge])
                if before >= 0:
                    num_others = num_readers[row, np.uint64(before)] - 1
                    num_readers[row, np.uint64(before)] = num_others
                    readers[row] ^= np.int64(num_others == 0) << before
                among = readers[row]
                where = np.uint64(where_of[row])
                fetch = fetch_of[row]
                share = share_of[row]
                # no branches: each would be taken at random
                is_alone = among == 0
                reads_there = (where < num_ranks) & (among >> np.int64(where & 63) & 1 == 1)
                owner = where if is_alone | reads_there else np.uint64(lowest(among))
                factor = fetch if is_alone else share
                for rank in range(num_ranks):
                    cost[rank] += factor * price[owner, rank] * (among >> rank & 1 ^ 1)
                cost[where] -= fetch * price[where, owner]
            best = NOBODY
            for rank in range(num_ranks):
                if left[rank] > 0 and (best == NOBODY or cost[rank] < cost[best]):
                    best = rank
            regret[sample] = regret_of(cost[:num_ranks])
            left[best] -= 1
            ranks[sample] = best
            for edge in range(np.uint64(first[sample]), np.uint64(end[sample])):
                row = np.uint64(shared[edge])
                num_readers[row, np.uint64(best)] += 1
                readers[row] |= one << best


@kernel
def mark(room: Room, offsets: Ints, ranks: NDArray[np.int16], readers: Ints) -> None:
    """Note which ranks read a row, by two assignments of the samples.

    Args:
        room: of the batch.
        offsets: of the bags, feature by feature, ``[F * B + 1]``.
        ranks: ``[2, B]``.
        readers: ``[U, 2]``, zeros; to be filled: a bit a rank.
    """
    num_samples = ranks.shape[1]
    num_features = (len(offsets) - 1) // max(1, num_samples)
    rows = room.rows
    bits = np.empty((num_samples, 2), np.int64)
    for sample in range(num_samples):
        bits[sample, 0] = np.int64(1) << ranks[0, sample]
        bits[sample, 1] = np.int64(1) << ranks[1, sample]
    for feature in range(num_features):
        for sample in range(num_samples):
            bag = feature * num_samples + sample
            for position in range(np.uint64(offsets[bag]), np.uint64(offsets[bag + 1])):
                if rows[position] >= 0:
                    row = np.uint64(rows[position])
                    readers[row, 0] |= bits[sample, 0]
                    readers[row, 1] |= bits[sample, 1]


@kernel
def count_transfers(room: Room, readers: Ints, price: Ints) -> np.int64:
    """What the rows cost that ranks read as ``readers`` ``[U]`` says, a bit a rank."""
    total = np.int64(0)
    for row in range(len(readers)):
        among = readers[row]
        where = np.int64(room.where[row])
        owner = where
        if where < 0 or among >> where & 1 == 0:
            owner = np.int64(lowest(among))
            if where >= 0:
                total += room.fetch[row] * price[where, owner]
        if count(among) > 1:
            for rank in range(len(price)):
                total += room.share[row] * price[owner, rank] * (among >> rank & 1)
    return total


@kernel
def settle(table: Ints, now: int, room: Room, readers: Ints) -> None:
    """Note in the table which rank has each row's record after the step.

    The rule of design note 0005: a reader, if possible who had it, else its home, else one by the
    row's address.
    """
    words = table.reshape(-1)
    last = len(readers) - 1
    for row in range(len(readers)):
        prefetch(table, room.slot[min(row + LINES_AHEAD, last)])
        among = readers[row]
        where = np.int64(room.where[row])
        home = np.int64(room.home[row])
        if where >= 0 and among >> where & 1:
            owner = where
        elif home >= 0 and among >> home & 1:
            owner = home
        else:
            for _ in range(room.address[row] % count(among)):
                among &= among - 1
            owner = np.int64(lowest(among))
        words[room.slot[row]] = now << 32 | (owner + 1)
