"""Samples to the ranks where their rows are: numbering a batch's rows, placing, counting.

Shape legend: B samples of a global batch, F features, V ids, E distinct rows of samples, U distinct
rows of the batch, W ranks, L lanes, P shards.

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
from pibroch.kernels.memory import prefetch
from pibroch.kernels.policy import kernel

LINE = 8
WAYS = LINE // 2
NOBODY = -1
ORDERS = 256  # regrets that are told apart where samples are put in order
NUMBERS = np.int64((1 << 32) - 1)


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
        first: int64 ``[B + 1]``, where each sample's rows begin in ``rows``.
        rows: int32 ``[V]``, numbers of the samples' distinct rows.
        last: int32 ``[V]``, of each row the last sample that reads it.
        reads: int32 ``[V]``, samples that read it.
        where: int16 ``[V]``, the rank that has its record, or ``NOBODY``.
        home: int16 ``[V]``, likewise the rank of its home.
        fetch: int32 ``[V]``, cost of reading it on another rank, once.
        share: int32 ``[V]``, cost of each rank more that reads it.
        address: int64 ``[V]``.
        slot: int64 ``[V]``, its word in the table.
    """

    first: Ints
    rows: NDArray[np.int32]
    last: NDArray[np.int32]
    reads: NDArray[np.int32]
    where: NDArray[np.int16]
    home: NDArray[np.int16]
    fetch: NDArray[np.int32]
    share: NDArray[np.int32]
    address: Ints
    slot: Ints


class Rules(NamedTuple):
    """By which samples are placed.

    Attributes:
        price: int64 ``[W, W]``, of a row's way from a rank to another, 0 to itself.
        passes: how often each sample is looked at once more after it was placed.
        most_reads: rows that more samples read are left aside: all ranks read them anyway.
        sharing: what a rank more that reads a row counts, in its ``share``.
    """

    price: Ints
    passes: int
    most_reads: int
    sharing: int


@kernel
def line_of(table: Ints, key: int) -> int:
    """The line of a key."""
    return (key >> 2 ^ key >> 23) & (len(table) - 1)


@kernel
def way_of(table: Ints, line: int, key: int, now: int) -> int:
    """Where a key is in its line, or may be; -1 where all of it is of this step."""
    for way in range(WAYS):
        if table[line, way] == key:
            return way
    chosen = 0
    for way in range(1, WAYS):
        step = table[line, WAYS + way] >> 32
        oldest = table[line, WAYS + chosen] >> 32
        is_before = step == oldest and table[line, way] < table[line, chosen]
        if step < oldest or is_before:
            chosen = way
    return -1 if table[line, WAYS + chosen] >> 32 == now else chosen


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
) -> tuple[int, int]:
    """Number the rows of a batch, sample by sample, and look up where they are.

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
        U and E.
    """
    num_features = len(lanes.of_feature)
    num_samples = (len(offsets) - 1) // max(1, num_features)
    last_position = len(addresses) - 1
    num_rows = 0
    num_edges = 0
    for sample in range(num_samples):
        room.first[sample] = num_edges
        for feature in range(num_features):
            lane = lanes.of_feature[feature]
            first_key = lanes.first_key[lane]
            bag = feature * num_samples + sample
            for position in range(offsets[bag], offsets[bag + 1]):
                address = addresses[position]
                if address < lanes.num_everywhere[lane]:
                    continue
                # the bag of the next sample; where that is another lane's, one line too many
                ahead = addresses[min(position + 1, last_position)] + first_key
                prefetch(table, line_of(table, ahead) * LINE)
                key = first_key + address
                line = line_of(table, key)
                way = way_of(table, line, key, now)
                if way < 0:  # rare: it counts as the row that has its place
                    way = key & (WAYS - 1)
                elif table[line, way] != key or table[line, WAYS + way] >> 32 != now:
                    word = table[line, WAYS + way] if table[line, way] == key else np.int64(0)
                    step = word >> 32
                    home = NOBODY
                    for shard in range(num_ranks):
                        if lanes.bounds[lane, shard] <= address < lanes.bounds[lane, shard + 1]:
                            home = shard
                    is_away = step > 0 and now - step <= horizon
                    weight = lanes.weight[lane]
                    room.home[num_rows] = home
                    room.where[num_rows] = (word & NUMBERS) - 1 if is_away else home
                    # where rows never leave the way back is a gradient's
                    room.fetch[num_rows] = weight if horizon > 0 else 2 * weight
                    room.share[num_rows] = 2 * weight
                    room.address[num_rows] = address
                    room.slot[num_rows] = line * LINE + WAYS + way
                    room.last[num_rows] = -1
                    room.reads[num_rows] = 0
                    table[line, way] = key
                    table[line, WAYS + way] = now << 32 | num_rows
                    num_rows += 1
                row = table[line, WAYS + way] & NUMBERS
                if room.last[row] != sample:
                    room.last[row] = sample
                    room.reads[row] += 1
                    room.rows[num_edges] = row
                    num_edges += 1
    room.first[num_samples] = num_edges
    return num_rows, num_edges


@kernel
def in_order(regret: Ints, order: Ints) -> None:
    """Write the samples to ``order`` ``[B]``, by falling regret; equals stay in their order."""
    most = np.int64(1)
    for sample in range(len(regret)):
        most = max(most, regret[sample])
    begin = np.zeros(ORDERS + 1, np.int64)
    for sample in range(len(regret)):
        begin[1 + (most - regret[sample]) * (ORDERS - 1) // most] += 1
    for place_ in range(ORDERS):
        begin[place_ + 1] += begin[place_]
    for sample in range(len(regret)):
        group = (most - regret[sample]) * (ORDERS - 1) // most
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
def place(room: Room, num_rows: int, sizes: Ints, rules: Rules, ranks: NDArray[np.int16]) -> None:
    """Write a rank for each sample to ``ranks`` ``[B]``, ``sizes[r]`` samples on rank r.

    See :func:`pibroch.kernels.assign.naive.place`, which means the same.
    """
    num_samples = len(ranks)
    num_ranks = len(sizes)
    price = rules.price
    # what a sample costs by the rows that nobody else reads, and the rows that others read as well
    alone = np.zeros((num_samples, num_ranks), np.int64)
    first = np.empty(num_samples + 1, np.int64)
    rows = np.empty(room.first[num_samples], np.int32)
    num_edges = 0
    for sample in range(num_samples):
        first[sample] = num_edges
        for edge in range(room.first[sample], room.first[sample + 1]):
            row = room.rows[edge]
            where = room.where[row]
            if room.reads[row] == 1:
                if where >= 0:
                    for rank in range(num_ranks):
                        alone[sample, rank] += room.fetch[row] * price[where, rank]
            elif room.reads[row] <= rules.most_reads:
                rows[num_edges] = row
                num_edges += 1
    first[num_samples] = num_edges
    readers = np.zeros((num_rows, num_ranks), np.int32)
    regret = np.empty(num_samples, np.int64)
    order = np.empty(num_samples, np.int64)
    cost = np.empty(num_ranks, np.int64)
    left = np.empty(num_ranks, np.int64)
    for sample in range(num_samples):
        ranks[sample] = NOBODY
        for rank in range(num_ranks):
            cost[rank] = alone[sample, rank]
        for edge in range(first[sample], first[sample + 1]):
            row = rows[edge]
            where = room.where[row]
            if where >= 0:
                for rank in range(num_ranks):
                    cost[rank] += room.fetch[row] * price[where, rank]
        regret[sample] = regret_of(cost)
    for _ in range(1 + rules.passes):
        in_order(regret, order)
        for rank in range(num_ranks):
            left[rank] = sizes[rank]
        for turn in range(num_samples):
            sample = order[turn]
            before = ranks[sample]
            for rank in range(num_ranks):
                cost[rank] = alone[sample, rank]
            for edge in range(first[sample], first[sample + 1]):
                row = rows[edge]
                if before >= 0:
                    readers[row, before] -= 1
                where = room.where[row]
                owner = NOBODY
                if where >= 0 and readers[row, where] > 0:
                    owner = where
                else:
                    for rank in range(num_ranks - 1, -1, -1):
                        if readers[row, rank] > 0:
                            owner = rank
                if owner == NOBODY:
                    if where >= 0:
                        for rank in range(num_ranks):
                            cost[rank] += room.fetch[row] * price[where, rank]
                    continue
                for rank in range(num_ranks):
                    if readers[row, rank] == 0:
                        cost[rank] += rules.sharing * room.share[row] * price[owner, rank]
                if where >= 0 and owner != where:
                    cost[where] -= room.fetch[row] * price[where, owner]
            best = NOBODY
            for rank in range(num_ranks):
                if left[rank] > 0 and (best == NOBODY or cost[rank] < cost[best]):
                    best = rank
            regret[sample] = regret_of(cost)
            left[best] -= 1
            ranks[sample] = best
            for edge in range(first[sample], first[sample + 1]):
                readers[rows[edge], best] += 1


@kernel
def mark(room: Room, ranks: NDArray[np.int16], reads: NDArray[np.bool_]) -> None:
    """Set ``reads`` ``[U, W]``, false before, where a sample of a rank reads a row."""
    for sample in range(len(ranks)):
        for edge in range(room.first[sample], room.first[sample + 1]):
            reads[room.rows[edge], ranks[sample]] = True


@kernel
def count_transfers(room: Room, reads: NDArray[np.bool_], price: Ints) -> np.int64:
    """What the rows cost that ranks read as ``reads`` ``[U, W]`` says."""
    num_ranks = reads.shape[1]
    total = np.int64(0)
    for row in range(len(reads)):
        where = room.where[row]
        owner = np.int64(where)
        if where < 0 or not reads[row, where]:
            owner = np.int64(NOBODY)
            for rank in range(num_ranks - 1, -1, -1):
                if reads[row, rank]:
                    owner = np.int64(rank)
            if where >= 0:
                total += room.fetch[row] * price[where, owner]
        for rank in range(num_ranks):
            if reads[row, rank]:
                total += room.share[row] * price[owner, rank]
    return total


@kernel
def settle(table: Ints, now: int, room: Room, reads: NDArray[np.bool_]) -> None:
    """Note in the table which rank has each row's record after the step.

    The rule of design note 0005: a reader, if possible who had it, else its home, else one by the
    row's address.
    """
    words = table.reshape(-1)
    num_ranks = reads.shape[1]
    for row in range(len(reads)):
        where = np.int64(room.where[row])
        home = np.int64(room.home[row])
        owner = np.int64(NOBODY)
        if where >= 0 and reads[row, where]:
            owner = where
        elif home >= 0 and reads[row, home]:
            owner = home
        else:
            num_readers = 0
            for rank in range(num_ranks):
                num_readers += reads[row, rank]
            skipped = room.address[row] % num_readers
            for rank in range(num_ranks):
                if reads[row, rank]:
                    if skipped == 0:
                        owner = np.int64(rank)
                    skipped -= 1
        words[room.slot[row]] = now << 32 | (owner + 1)
