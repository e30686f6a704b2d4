"""What the lookahead oracle's kernels share: arrays, and rules for one row (design note 0005)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pibroch.exchange.lookahead.oracle.kernels.window.masks import BITS, Words, bit_in, first_bits
from pibroch.kernels.arrays import Array, Ints
from pibroch.kernels.bits import count, lowest
from pibroch.kernels.policy import kernel

LRPP = 0
PARTITIONED = 1
REPLICATED = 2
HOME = -1  # holder of a record that is at its home
AHEAD = 32  # rows between the one that is looked at and the one that is fetched

Places = NDArray[np.int32]
Ranks = NDArray[np.signedinteger]


class Window(NamedTuple):
    """Touches in a ring: touch n has the index ``n & (C - 1)``, a step's lie side by side.

    Sets of ranks are masks ``[K, C]``, see ``masks.py``; all else is ``[C]`` where no other is
    given.

    Attributes:
        words: of masks.
        newest: int32 ``[N]`` by the rows' numbers: index + 1 of each one's last touch in the
            window, 0 for none.
        holder: int8 or int16 ``[N]``, the rank whose slot has each row's record, or ``HOME``.
        slot: int32 ``[N]``, where it is if this rank holds it.
        row: address.
        number: of the row, among the N whose state is kept; where state is kept of all rows the
            same array as ``row``.
        readers: the ranks that touch the row.
        behind: how much lower the number of the row's touch before is, 0 for none that was in the
            window with it.
        then: the ranks that read the row in the next step, nobody when none does, or it is not in
            the window yet.
        owner: the rank that updates the row in the step, once it has arrived.
        borrowed: the ranks whose slots have weights for this step only.
        place: where this rank reads, or updates, the row in the step; undefined where it does
            neither.
    """

    words: Words
    newest: Places
    holder: Ranks
    slot: Places
    row: Array
    number: Places
    readers: Array
    behind: Places
    then: Array
    owner: Ranks
    borrowed: Array
    place: Places


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
    """Places for what is not at home here.

    A stack of free ones, and how many every rank has in use.

    Attributes:
        free: int32, a stack, with room for one more than there are.
        depth: int64 ``[1]``, free places on the stack.
        used: int64 ``[P]``.
    """

    free: Places
    depth: Ints
    used: Ints


class Transfer(NamedTuple):
    """Rows that travel; everything is grouped by the other rank, in the same order on both.

    Attributes:
        records_out, weights_out: int64 places here of records that leave for good, and of weights
            that others borrow.
        records_in, weights_in: int64 places here for those that come.
        counts: int64 ``[4, P]``, how many of these four to or from each rank.
        rows_in, borrowed_rows_in: addresses of ``records_in`` and ``weights_in``.
    """

    records_out: Ints
    weights_out: Ints
    records_in: Ints
    weights_in: Ints
    counts: Ints
    rows_in: Ints
    borrowed_rows_in: Ints


class Gradients(NamedTuple):
    """Gradients that travel, and the updates made of them.

    Attributes:
        given: int64, positions among this rank's sums of gradients that leave, grouped by owner.
        counts: int64 ``[2, P]``, how many go to, and how many come from each rank.
        places: int64 ``[U]``, places of the records to update here.
        segments: int32 ``[U + 1]``.
        source: int32: the contributions to row u are ``source[segments[u]:segments[u + 1]]``, in
            rank order: numbers of this rank's own sums, or of received gradients, which follow
            these.
    """

    given: Ints
    counts: Ints
    places: Ints
    segments: Places
    source: Places


@kernel
def home_of(bounds: Ints, row: int) -> int:
    """The rank whose shard has the row."""
    home = 0
    if len(bounds) > BITS:
        end = len(bounds) - 1
        while end - home > 1:
            middle = (home + end) // 2
            if row < bounds[middle]:
                end = middle
            else:
                home = middle
        return home
    # few homes, as many as ranks: a walk, not a search by halves
    while row >= bounds[home + 1]:
        home += 1
    return home


@kernel
def owner_of(
    site: Site, words: Words, readers: Array, then: Array, at: int, source: int, home: int, row: int
) -> int:
    """The rank that updates a row in touch ``at``.

    It follows from the row's readers in this step and the next, and the rank of its record.

    Decision 2 of design note 0005.
    """
    if site.design != LRPP:
        return home if home < site.num_trainers else row % site.num_trainers
    # who also reads it in the next step saves that step the way; else any reader will do
    in_both = np.int64(0)
    for word in range(len(words)):
        in_both |= np.int64(readers[word, at]) & np.int64(then[word, at])
    any_reader = np.int64(0) if in_both != 0 else np.int64(-1)
    num_among = 0
    first = 0
    source_fits = np.int64(0)
    home_fits = np.int64(0)
    for back in range(len(words)):
        word = len(words) - 1 - back
        among = np.int64(readers[word, at]) & (np.int64(then[word, at]) | any_reader)
        num_among += count(among)
        first = BITS * word + lowest(among) if among != 0 else first
        source_fits |= among & bit_in(words, word, source)
        home_fits |= among & bit_in(words, word, home)
    # no branches up to here: selections will do
    default = source if source_fits != 0 else home
    owner = first if num_among == 1 else default
    if (source_fits | home_fits) != 0 or num_among == 1:
        return owner
    # neither source nor home reads it: spread such rows evenly, by address, the same on every rank
    skipped = row % num_among
    for word in range(len(words)):
        among = np.int64(readers[word, at]) & (np.int64(then[word, at]) | any_reader)
        if skipped < count(among):
            for _ in range(skipped):
                among &= among - 1
            return BITS * word + lowest(among)
        skipped -= count(among)
    return first


@kernel
def always_reading(site: Site, words: Words, word: int) -> np.int64:
    """Bits of the ranks that get every row's weights, whether they touch it or not."""
    return first_bits(words, word, site.num_trainers) if site.design == REPLICATED else np.int64(0)


@kernel
def slots_taken(borrowers: int, had: int, owns: int, is_at_home: bool) -> np.int64:
    """Bits of the ranks that need one more slot when a row arrives.

    The last three say where its record was and is.
    """
    # the source has it already; an owner at home keeps it in its shard, which takes no slot
    return (borrowers | owns) & ~had & ~(owns * np.int64(is_at_home))


@kernel
def starts_of(counts: Ints) -> Ints:
    """Where each rank's part begins: the sum of ``counts`` ``[K, P]`` over the ranks before."""
    starts = np.zeros(counts.shape, np.int64)
    for kind in range(counts.shape[0]):
        # an exclusive prefix sum
        for rank in range(1, counts.shape[1]):
            starts[kind, rank] = starts[kind, rank - 1] + counts[kind, rank - 1]
    return starts
