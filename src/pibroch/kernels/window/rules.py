"""What the lookahead oracle's kernels share: their arrays, and the rules of design note 0005 for one row."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pibroch.kernels.arrays import Array, Ints
from pibroch.kernels.bits import lowest
from pibroch.kernels.policy import kernel

LRPP, PARTITIONED, REPLICATED = 0, 1, 2
HOME = -1  # holder of a record that is at its home

Places = NDArray[np.int32]


class Window(NamedTuple):
    """Touches in a ring; touch n has the index ``n & (C - 1)``, and those of one step lie side by side.

    Attributes:
        newest: int32 ``[N]`` by the rows' numbers: index + 1 of each one's last touch in the window, 0 for none.
        holder: int8 ``[N]``, the rank whose slot has each row's record, or ``HOME``.
        slot: int32 ``[N]``, where it is if this rank holds it.
        row: address.
        number: of the row, among the N whose state is kept; where state is kept of all rows the same array as ``row``.
        readers: bit r for rank r.
        behind: how much lower the number of the row's touch before is, 0 for none that was in the window with it.
        then: bits of the ranks that read the row in the next step, 0 when none does, or it is not in the window yet.
        owner: the rank that updates the row in the step, once it has arrived.
        lent: bits of the ranks whose slots have weights for this step only.
        place: where this rank reads, or updates, the row in the step; undefined where it does neither.
    """

    newest: Places
    holder: NDArray[np.int8]
    slot: Places
    row: Array
    number: Places
    readers: Array
    behind: Places
    then: Array
    owner: NDArray[np.int8]
    lent: Array
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
    """Places for what is not at home here: a stack of free ones, and how many every rank has in use.

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
    segments: Places
    source: Places


@kernel
def home_of(bounds: Ints, row: int) -> int:
    """The rank whose shard has the row."""
    home = 0
    # few homes, as many as ranks: a walk, not a search by halves
    while row >= bounds[home + 1]:
        home += 1
    return home


@kernel
def owner_of(design: int, num_trainers: int, readers: int, then: int, source: int, home: int, row: int) -> int:
    """Who updates a row that ``readers`` touch, and ``then`` in the next step, whose record is at rank ``source``.

    Decision 2 of design note 0005.
    """
    if design != LRPP:
        return home if home < num_trainers else row % num_trainers
    # who also reads it in the next step saves that step the way; else any reader will do
    both = readers & then
    among = both if both != 0 else readers
    # a power of two has one bit; no branches from here on where bits will do
    is_single, source_fits, home_fits = among & (among - 1) == 0, (among >> source) & 1, (among >> home) & 1
    first = lowest(among)
    known = source if source_fits else home
    owner = first if is_single else known
    if (source_fits | home_fits) != 0 or is_single:
        return owner
    # neither source nor home reads it: spread such rows evenly, by address, the same on every rank
    count, rest = 0, among
    while rest:
        rest &= rest - 1
        count += 1
    rest = among
    for _ in range(row % count):
        rest &= rest - 1
    return lowest(rest)


@kernel
def always_reading(site: Site) -> np.int64:
    """Bits of the ranks that get every row's weights, whether they touch it or not."""
    return (np.int64(1) << np.int64(site.num_trainers)) - 1 if site.design == REPLICATED else np.int64(0)


@kernel
def slots_taken(borrowers: int, source: int, owner: int, home: int) -> np.int64:
    """Bits of the ranks that need one more slot when a row arrives."""
    # the source has it already; an owner at home keeps it in its shard, which takes no slot
    owns = np.int64(1) << np.int64(owner)
    return (borrowers | owns) & ~(np.int64(1) << np.int64(source)) & ~(owns * np.int64(owner == home))


@kernel
def add_bits(masks: Array, amount: int, totals: Ints) -> None:
    """Add to ``totals`` ``[P]``, for each rank, ``amount`` times the number of ``masks`` that have its bit."""
    for rank in range(len(totals)):
        count = 0
        for i in range(len(masks)):
            count += (masks[i] >> rank) & 1
        totals[rank] += amount * count


@kernel
def starts_of(counts: Ints) -> Ints:
    """Where each rank's part begins: the sum of ``counts`` ``[K, P]`` over the ranks before."""
    starts = np.zeros_like(counts)
    for kind in range(counts.shape[0]):
        # an exclusive prefix sum
        for rank in range(1, counts.shape[1]):
            starts[kind, rank] = starts[kind, rank - 1] + counts[kind, rank - 1]
    return starts
