"""What is in slots, in memory that outlives a process.

Two steps of it, the older one making room for the next.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from pibroch.exchange.lookahead.kept_slots import KeptSlots
from pibroch.state.kept_rows import HEAD_BYTES

MOST = 12
WIDTH = 5


def carrier_of(rows):
    """Stands for a carrier with these rows in slots, and records by which they are known."""
    space = np.zeros((40, WIDTH), np.float32)
    places = np.arange(len(rows)) * 3 % 37
    space[places] = np.asarray(rows, np.float32)[:, None] + np.arange(WIDTH, dtype=np.float32) / 8
    carrier = SimpleNamespace(space=space, returned=None)
    carrier.cached = lambda: (np.asarray(rows, np.int64), places)
    return carrier


def memory():
    return np.zeros(HEAD_BYTES + 2 * MOST * (8 + 4 * WIDTH), np.uint8)


def test_the_newest_two_steps_are_there_and_come_back_each():
    room = memory()
    of_step = {1: [7, 3], 2: [], 3: list(range(MOST)), 4: [9]}
    KeptSlots(carrier_of(of_step[1]), room, WIDTH).begin(1)
    for step in (2, 3, 4):
        kept = KeptSlots(carrier_of(of_step[step]), room, WIDTH)
        kept.cut(step)
        assert kept.steps() == {step - 1, step}
    for step in (3, 4):
        carrier = carrier_of([])
        again = KeptSlots(carrier, room.copy(), WIDTH)
        again.restore(step)
        assert again.steps() == {step}
        rows, records = carrier.returned
        assert rows.tolist() == of_step[step]
        np.testing.assert_array_equal(
            records, rows[:, None].astype(np.float32) + np.arange(WIDTH) / 8
        )


def test_what_was_there_before_a_beginning_does_not_count():
    room = memory()
    KeptSlots(carrier_of([1]), room, WIDTH).begin(8)
    again = KeptSlots(carrier_of([2]), room, WIDTH)
    again.begin(0)
    assert again.steps() == {0}


def test_one_that_is_killed_while_it_writes_leaves_the_step_before():
    room = memory()
    KeptSlots(carrier_of([1]), room, WIDTH).begin(1)
    KeptSlots(carrier_of([2]), room, WIDTH).cut(2)
    with pytest.raises(ValueError, match="broadcast"):  # more rows than there can be
        KeptSlots(carrier_of(list(range(MOST + 1))), room, WIDTH).cut(3)
    assert KeptSlots(carrier_of([]), room, WIDTH).steps() == {2}
