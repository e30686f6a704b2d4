"""What one must hear who takes an oracle's place.

This feed, and the one before while another rank may be in it.
"""

import numpy as np
import pytest
import torch

from pibroch.errors import ProtocolError, TrainingError
from pibroch.exchange.lookahead import feed_log
from pibroch.exchange.lookahead.feed_log import FeedLog
from pibroch.exchange.lookahead.oracle import PlanRequest
from pibroch.exchange.lookahead.oracle.encoding import Parts, decode_plan
from pibroch.exchange.lookahead.oracle.kernels.varint import naive as varint
from pibroch.servers.plan_service import PlanService

BOUNDS = [np.array([0, 10, 20])]
STEPS = [([1, 12], [3, 12]), ([12], [1, 4]), ([13], [1]), ([1, 2, 15], [4]), ([12], [12])]
REQUESTS = [("open", 3), ("plan", 3), ("plan", 4)]


def encoded(rows):
    return torch.tensor(list(varint.encode(rows)), dtype=torch.uint8)


def kept(log):
    return [step.number for step in log.steps], [
        number for number, _ in log.answered() + log.unanswered()
    ]


def test_a_feed_is_kept_until_an_answer_in_a_later_one_says_that_all_are_there():
    log = FeedLog()
    for feed in (1, 1, 2):
        log.add(feed, [1], encoded([1]))
    first, second = (
        log.ask(PlanRequest("open", feed, number)) for feed, number in ((1, 2), (2, 3))
    )
    log.answer(first)
    assert kept(log) == ([0, 1, 2], [0, 1]) and log.unanswered() == [(1, PlanRequest("open", 2, 3))]
    log.answer(second)
    assert kept(log) == ([2], [1]) and (log.first_step, log.first_request) == (2, 1)
    assert log.ask(PlanRequest("plan", 2, 3)) == 2


def test_of_a_feed_that_is_too_large_nothing_is_kept(monkeypatch):
    monkeypatch.setattr(feed_log, "MOST_BYTES", 3)
    log = FeedLog()
    for number in range(4):
        log.add(1, [1], encoded([1]))
        assert log.is_whole == (number < 3)
    for number in range(3):
        assert log.ask(PlanRequest("plan", 1, 4)) == number
    log.answer(0)
    log.answer(2)
    assert kept(log) == ([], [2, 1]), "nobody will be told of the first request"
    log.answer(1)
    assert kept(log) == ([], [])
    assert log.add(2, [1], encoded([1])).number == 4
    assert not log.is_whole and log.first_step == 4, "another rank may still be in feed 1"
    log.answer(log.ask(PlanRequest("open", 2, 5)))
    assert log.is_whole and kept(log) == ([4], [3])


def parts_of(answer):
    return Parts(*(part.numpy() for part in answer.wait()))


def test_one_in_its_place_gives_the_answers_that_it_would_have_given():
    """Two steps and requests after the first ones.

    The first answers are made again, and nobody gets them.
    """
    whole = PlanService(BOUNDS, [8], 2, 2, "lrpp", True)
    answers = []
    for number, (kind, steps) in enumerate([*REQUESTS, ("plan", 5)]):
        answers.append(whole.ask(0, number, PlanRequest(kind, 1, steps)))
    for number, parts in enumerate(STEPS):
        for trainer in range(2):
            whole.add(trainer, number, 1, [np.array(parts[trainer])])
    expected = [answer.wait() for answer in answers[1:]]

    other = PlanService(BOUNDS, [8], 2, 2, "lrpp", True, goes_on=True)
    first_step = 7
    first_request = 4
    # trainer 1 sends its steps before trainer 0 says where it is
    for number, parts in enumerate(STEPS[:3], first_step):
        other.add(1, number, 2, [np.array(parts[1])])
    requests = [
        (first_request + n, PlanRequest(kind, 2, 7 + steps))
        for n, (kind, steps) in enumerate(REQUESTS[:2])
    ]
    other.go_on(1, 5, 0, [])  # of which two steps are of a feed that trainer 0 has left
    other.go_on(0, first_step, first_request, requests)
    other.add(1, 5, 1, [np.array([3])])
    with pytest.raises(ProtocolError, match="each once"):
        other.go_on(0, first_step, first_request, [])
    later = [
        other.ask(0, 6, PlanRequest("plan", 2, 11)),
        other.ask(0, 7, PlanRequest("plan", 2, 12)),
    ]
    left = other.ask(1, 0, PlanRequest("plan", 1, 6))
    for number, parts in enumerate(STEPS, first_step):
        other.add(0, number, 2, [np.array(parts[0])])
    for number, parts in enumerate(STEPS[3:], first_step + 3):
        other.add(1, number, 2, [np.array(parts[1])])
    for answer, right in zip(later, expected[1:], strict=True):
        plan = decode_plan(parts_of(answer))
        right_plan = decode_plan(Parts(*(part.numpy() for part in right)))
        assert np.array_equal(plan.places, right_plan.places) and np.array_equal(
            plan.used, right_plan.used
        )
        assert (
            np.array_equal(plan.critical.given, right_plan.critical.given)
            and plan.lookahead == right_plan.lookahead
        )
    with pytest.raises(TrainingError, match="about feed 1 in feed"):
        left.wait()
