"""What becomes of a step's gradients: who sends which to whom, and what is updated by them here."""

from __future__ import annotations

import numpy as np

from pibroch.exchange.lookahead.oracle.kernels.window.masks import BITS, add_bits, bit_in, is_in
from pibroch.exchange.lookahead.oracle.kernels.window.rules import (
    Gradients,
    Places,
    Site,
    Slots,
    Window,
    starts_of,
)
from pibroch.kernels.bits import lowest
from pibroch.kernels.policy import kernel


@kernel
def settle(
    window: Window,
    site: Site,
    slots: Slots,
    begin: int,
    end: int,
    touches: Places,
    own: Places,
    delayed: bool,
) -> tuple[Gradients, Gradients, Gradients]:
    """Decide who sends which gradients to whom after a step, and what is updated by them here.

    Returns the critical gradients, the deferred ones, and those of rows that this rank alone
    touched. Received gradients are numbered after this rank's own sums, critical ones first. Slots
    with weights for this step only are free afterwards.

    Args:
        window: of all touches.
        site: the rules.
        slots: in use.
        begin: index of the step's first touch.
        end: index behind its last one.
        touches: that concern this rank, see :func:`arrive`.
        own: this rank's touches, in the order of its sums.
        delayed: whether rows that the next step does not touch are not critical.
    """
    here = site.rank
    words = window.words
    readers_of = window.readers
    owners = window.owner
    then_of = window.then
    borrowed_of = window.borrowed
    place_of = window.place
    free = slots.free
    depth = np.uint64(slots.depth[0])
    sum_of = np.empty(end - begin, np.int32)  # by touch, the number of this rank's sum of gradients
    for i in range(len(own)):
        sum_of[own[i] - begin] = i
    # owned and critical, owned and deferred, given and critical, given and deferred, alone
    kinds = np.empty((5, len(touches)), np.int32)
    num_owned = np.uint64(0)
    num_deferred = np.uint64(0)
    num_alone = np.uint64(0)
    num_given = np.uint64(0)
    num_given_later = np.uint64(0)
    for i in range(len(touches)):
        at = np.uint64(touches[i])
        owns = owners[at] == here
        reads = np.int64(0)
        other_readers = np.int64(0)
        then = np.int64(0)
        for word in range(len(words)):
            readers = np.int64(readers_of[word, at])
            only_here = bit_in(words, word, here)
            reads |= readers & only_here
            other_readers |= readers & ~only_here
            then |= np.int64(then_of[word, at])
        is_critical = (then != 0) | (not delayed)
        alone = owns & (other_readers == 0) & (not is_critical)
        gives = (not owns) & (reads != 0)
        kinds[0, num_owned] = at
        kinds[1, num_deferred] = at
        kinds[2, num_given] = at
        kinds[3, num_given_later] = at
        kinds[4, num_alone] = at
        num_owned += np.uint64(owns & is_critical)
        num_deferred += np.uint64(owns & (not is_critical) & (not alone))
        num_given += np.uint64(gives & is_critical)
        num_given_later += np.uint64(gives & (not is_critical))
        num_alone += np.uint64(alone)
        free[depth] = place_of[at]  # weights that were borrowed for this step
        depth += np.uint64(is_in(words, borrowed_of, at, here))
    slots.depth[0] = depth
    critical = _sums(
        window, site, kinds[0, :num_owned], kinds[2, :num_given], sum_of, begin, len(own)
    )
    num_received = len(own)
    for rank in range(critical.counts.shape[1]):
        num_received += critical.counts[1, rank]
    deferred = _sums(
        window,
        site,
        kinds[1, :num_deferred],
        kinds[3, :num_given_later],
        sum_of,
        begin,
        num_received,
    )
    places = np.empty(num_alone, np.int64)
    source = np.empty(num_alone, np.int32)
    for i in range(len(places)):
        places[i] = place_of[kinds[4, i]]
        source[i] = sum_of[kinds[4, i] - begin]
    segments = np.empty(len(places) + 1, np.int32)
    for i in range(len(segments)):
        segments[i] = i
    nothing = np.zeros(critical.counts.shape, np.int64)
    alone = Gradients(np.empty(0, np.int64), nothing, places, segments, source)
    return critical, deferred, alone


@kernel
def _sums(
    window: Window,
    site: Site,
    owned: Places,
    given_here: Places,
    sum_of: Places,
    begin: int,
    num_before: int,
) -> Gradients:
    """The gradients that this rank sends for the rows ``given_here``, and receives for ``owned``.

    Received ones are numbered from ``num_before`` on.
    """
    here = site.rank
    num_ranks = len(site.bounds) - 1
    readers_of = window.readers
    owners = window.owner
    place_of = window.place
    counts = np.zeros((2, num_ranks), np.int64)
    words = window.words
    to_come = counts[1]
    for at in given_here:
        counts[0, owners[at]] += 1
    readers = np.empty(len(owned), readers_of.dtype)
    for word in range(len(words)):
        for i in range(len(owned)):
            readers[i] = readers_of[word, owned[i]]
        add_bits(readers, BITS * word, 1, to_come)
    # its own sums are contributions, but do not travel
    num_sources = 0
    for rank in range(num_ranks):
        num_sources += to_come[rank]
    counts[1, here] = 0
    position = starts_of(counts)
    for rank in range(num_ranks):
        position[1, rank] += num_before
    given = np.empty(len(given_here), np.int64)
    places = np.empty(len(owned), np.int64)
    segments = np.zeros(len(owned) + 1, np.int32)
    source = np.empty(num_sources, np.int32)
    filled = 0
    for at in given_here:
        owner = owners[at]
        given[position[0, owner]] = sum_of[at - begin]
        position[0, owner] += 1
    for i in range(len(owned)):
        at = owned[i]
        places[i] = place_of[at]
        for word in range(len(words)):
            rest = np.int64(readers_of[word, at])
            # from the lowest rank up: gradients are added in rank order
            while rest:
                rank = BITS * word + lowest(rest)
                source[filled] = sum_of[at - begin] if rank == here else position[1, rank]
                position[1, rank] += 1
                filled += 1
                rest &= rest - 1
        segments[i + 1] = filled
    return Gradients(given, counts, places, segments, source)
