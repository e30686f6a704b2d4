"""Processes that measure at once: turn by turn, and what becomes of one that fails."""

import os
import time
from collections.abc import Iterator
from itertools import count

import pytest

from pibroch.errors import PibrochError
from pibroch.sim.measuring import Party, in_turns


def counting(party: Party) -> Iterator[tuple[int, int]]:
    for number in count():
        party.begin(f"turn {number}")
        yield party.ranks.rank, number


def test_each_turn_has_the_next_answer_of_every_process() -> None:
    with in_turns(counting, 2, print) as ask:
        assert [ask() for _ in range(3)] == [[(0, turn), (1, turn)] for turn in range(3)]


def failing(party: Party) -> Iterator[int]:
    yield party.ranks.world_size
    raise ValueError("nothing more to measure")


def test_a_failure_in_a_later_turn_is_told() -> None:
    with in_turns(failing, 2, print) as ask:
        assert ask() == [2, 2]
        with pytest.raises(PibrochError, match="nothing more to measure"):
            ask()


def ending(_: Party) -> Iterator[int]:
    yield 1
    os._exit(3)


def test_a_process_that_ends_is_told() -> None:
    with in_turns(ending, 1, print) as ask:
        ask()
        with pytest.raises(PibrochError, match="ended with 3"):
            ask()


def failing_alone(party: Party) -> Iterator[None]:
    if party.ranks.rank == 1:
        raise ValueError("no such link")
    party.begin("what the other one never does")
    yield


def test_a_failure_is_told_while_others_wait_for_that_process() -> None:
    start = time.monotonic()
    with (
        in_turns(failing_alone, 2, print) as ask,
        pytest.raises(PibrochError, match="no such link"),
    ):
        ask()
    assert time.monotonic() - start < 60
