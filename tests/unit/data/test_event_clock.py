"""Event time as steps move it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pibroch.data.event_clock import EventClock, merged, runs_of

SECOND, DAY, YEAR = 1000, 86_400_000, 365 * 86_400_000
NOW = 1_700_000_000_000
LEAST, MOST = -(2**63) + 1, 2**63 - 1
times = st.one_of(st.integers(-40, 60), st.sampled_from([LEAST, LEAST + 5, MOST - 5, MOST]))


def after(clock, *steps):
    """The time after each step."""
    found = []
    for each in steps:
        clock.advance(runs_of(np.array(each, np.int64), SECOND))
        found.append(clock.time)
    return found


@given(st.lists(st.lists(times, max_size=9), max_size=9), st.integers(1, 12), st.data())
def test_neither_ranks_nor_shorter_gaps_make_a_difference(steps, gap, data):
    whole, parted = EventClock(gap), EventClock(gap)
    for step in steps:
        ranks = data.draw(st.lists(st.integers(0, 2), min_size=len(step), max_size=len(step)))
        parts = [
            runs_of(
                np.array([t for t, r in zip(step, ranks, strict=True) if r == rank], int), gap // 2
            )
            for rank in range(3)
        ]
        runs = runs_of(np.array(step, np.int64), gap)
        assert merged(np.concatenate(parts), gap).tolist() == runs.tolist()
        assert parted.advance(np.concatenate(parts)) == whole.advance(runs)
        assert parted.state().tolist() == whole.state().tolist()


@given(st.lists(st.lists(times, min_size=1, max_size=9), min_size=2, max_size=9))
def test_time_never_goes_back_and_leaps_where_more_than_half_of_a_step_are_beyond(steps):
    clock = EventClock(7)
    for step in steps:
        before = clock.time
        clock.advance(runs_of(np.array(step, np.int64), 7))
        if before is None:
            continue
        beyond = [time for time in step if time > before]
        assert clock.time >= before
        if beyond and min(beyond) - before > 7 and clock.time != before:
            assert len(beyond) > len(step) / 2


def test_wrong_clocks_are_counted_and_not_followed():
    clock = EventClock(SECOND)
    steps = [[NOW + 100 * step + ahead for ahead in (0, 3, YEAR, 9)] for step in range(50)]
    found = after(clock, *steps)
    assert found[0] is None and found[1:] == [step[3] for step in steps[1:]]
    assert clock.num_ahead == 49


@pytest.mark.parametrize("wrong", [0, NOW + 10 * YEAR, 1000 * NOW])
def test_steps_of_one_record_are_not_led_astray_by_one(wrong):
    steps = [[NOW], [wrong], [NOW + 10], [NOW + 20]]
    assert after(EventClock(SECOND), *steps)[1:] == [
        min(NOW, wrong),
        NOW + 10 if wrong else 0,
        NOW + 20,
    ]
    first_is_wrong = after(EventClock(SECOND), [wrong], [NOW], [NOW + 10], [NOW + 20])
    assert first_is_wrong[-1] == NOW + 20


def test_a_silence_is_followed_once_a_second_step_says_so():
    clock = EventClock(SECOND)
    assert after(clock, [NOW], [NOW], [NOW + DAY], [NOW + DAY + 5]) == [
        None, NOW, NOW, NOW + DAY + 5,
    ]  # fmt: skip
    weekly = [[NOW + 7 * DAY * week] for week in range(1, 9)]
    assert after(clock, *weekly)[1:] == [week[0] for week in weekly[:-1]], "a step behind"


def test_more_of_the_same_step_confirms_nothing():
    clock = EventClock(SECOND)
    after(clock, [NOW], [NOW], [NOW + YEAR])
    clock.advance(runs_of(np.array([NOW + YEAR]), SECOND), same_step=True)
    assert clock.time == NOW
    assert after(clock, [NOW + 1], [NOW + YEAR]) == [NOW + 1, NOW + 1]


def test_what_was_saved_goes_on_alike():
    clock, other = EventClock(SECOND), EventClock(SECOND)
    after(clock, [NOW], [NOW], [NOW + YEAR])
    other.load_state(clock.state())
    rest = [NOW + YEAR + 3, NOW], [NOW + YEAR] * 3, [NOW + YEAR + 4] * 3
    assert after(other, *rest) == after(clock, *rest)
