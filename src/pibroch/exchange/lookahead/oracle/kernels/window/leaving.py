"""What nobody in the window touches again, or waits too long for its room: its records go home."""

from __future__ import annotations

import numpy as np

from pibroch.exchange.lookahead.oracle.kernels.window.masks import BITS, add_bits
from pibroch.exchange.lookahead.oracle.kernels.window.rules import (
    AHEAD,
    HOME,
    Places,
    Site,
    Slots,
    Transfer,
    Window,
    home_of,
    starts_of,
)
from pibroch.kernels.memory import prefetch
from pibroch.kernels.policy import kernel


@kernel
def close(window: Window, slots: Slots, begin: int, end: int) -> tuple[Places, Places]:
    """End a step on all ranks: slots with weights for this step only are no longer in use.

    Returns the touches whose rows nobody in the window touches again, and those of them whose
    records have to go home.
    """
    for word in range(len(window.words)):
        add_bits(window.borrowed[word, begin:end], BITS * word, -1, slots.used)
    last = np.empty(end - begin, np.int32)
    num_last = np.uint64(0)
    newest = window.newest
    number_of = window.number
    holders = window.holder
    for at in range(begin, end):
        prefetch(newest, np.int64(number_of[min(at + AHEAD, end - 1)]))
        last[num_last] = at
        # no later touch in the window
        num_last += np.uint64(newest[np.uint64(number_of[at])] == at + 1)
    leaving = np.empty(num_last, np.int32)
    num_leaving = np.uint64(0)
    for at in last[:num_last]:
        number = np.uint64(number_of[at])
        newest[number] = 0
        leaving[num_leaving] = at
        num_leaving += np.uint64(holders[number] != HOME)
    return last[:num_last].copy(), leaving[:num_leaving].copy()


@kernel
def waiting_for(window: Window, touches: Places, begin: int, gap: int) -> Places:
    """Of touches of a step that have not arrived, those for which records wait in slots.

    The holders own these rows now.

    Args:
        window: of all touches.
        touches: of the step.
        begin: index of its first touch.
        gap: how much lower the number of the first touch is that has not been trained.
    """
    waiting = np.empty(len(touches), np.int32)
    num_waiting = 0
    for at in touches:
        number = window.number[at]
        if window.holder[number] != HOME and window.behind[at] > at - begin + gap:
            window.owner[at] = window.holder[number]
            window.place[at] = window.slot[number]
            waiting[num_waiting] = at
            num_waiting += 1
    return waiting[:num_waiting].copy()


@kernel
def go_home(window: Window, site: Site, slots: Slots, leaving: Places) -> Transfer:
    """List the records that go home from the slots of the touches' owners, and free these."""
    num_ranks = len(site.bounds) - 1
    here = site.rank
    counts = np.zeros((4, num_ranks), np.int64)
    for at in leaving:
        home = home_of(site.bounds, np.int64(window.row[at]))
        holder = np.int64(window.owner[at])
        counts[0, home] += holder == here
        counts[2, holder] += home == here
        slots.used[holder] -= 1  # every rank keeps count for all: it must know where there is room
    position = starts_of(counts)
    records_out = np.empty(counts[0].sum(), np.int64)
    records_in = np.empty(counts[2].sum(), np.int64)
    rows_in = np.empty(len(records_in), np.int64)
    nothing = np.empty(0, np.int64)
    for at in leaving:
        row = np.int64(window.row[at])
        holder = np.int64(window.owner[at])
        home = home_of(site.bounds, row)
        window.holder[window.number[at]] = HOME
        if holder == here:
            records_out[position[0, home]] = window.place[at]
            position[0, home] += 1
            slots.free[slots.depth[0]] = window.place[at]
            slots.depth[0] += 1
        if home == here:
            records_in[position[2, holder]] = row - site.bounds[here]
            rows_in[position[2, holder]] = row
            position[2, holder] += 1
    return Transfer(records_out, nothing, records_in, nothing, counts, rows_in, nothing)
