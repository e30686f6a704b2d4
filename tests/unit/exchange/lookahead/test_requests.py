"""Plan requests wait for the steps that they are about, and are answered in their order."""

import numpy as np
import pytest

from pibroch.errors import ConfigError, TrainingError
from pibroch.exchange.lookahead.oracle import JointOracle, Oracle, PlanQueue, PlanRequest

BOUNDS = np.array([0, 5, 10])
STEPS = [
    [np.array(own), np.array(others)]
    for own, others in [([1, 7], [7]), ([7], [2]), ([8, 9], [4]), ([0], [9])]
]


def make(capacity=6, lookahead=1):
    return PlanQueue(JointOracle([Oracle(BOUNDS, 0, lookahead, capacity)]))


def test_a_request_waits_for_its_steps_and_for_the_request_before():
    queue = make()
    queue.ask(1, PlanRequest("plan", 1, 2))
    queue.add(1, [STEPS[0]])
    queue.add(1, [STEPS[1]])
    assert queue.take() is None, "request 0 has not come"
    queue.ask(0, PlanRequest("open", 1, 1))
    queue.ask(2, PlanRequest("plan", 1, 3))
    oracle = Oracle(BOUNDS, 0, 1, 6)
    for step in STEPS[:3]:
        oracle.add(step)
    number, request = queue.take()
    assert number == 0 and np.array_equal(queue.answer(request)[0].places, oracle.open().places)
    number, request = queue.take()
    assert number == 1 and np.array_equal(queue.answer(request)[0].places, oracle.plan().places)
    assert queue.take() is None
    queue.add(1, [STEPS[2]])
    assert queue.take()[0] == 2


def test_a_new_feed_forgets_the_one_before():
    queue = make()
    for step in STEPS[:3]:
        queue.add(1, [step])
    queue.ask(0, PlanRequest("open", 1, 2))
    queue.answer(queue.take()[1])
    queue.ask(1, PlanRequest("plan", 1, 3))
    queue.ask(2, PlanRequest("open", 2, 4))
    queue.add(2, [STEPS[3]])
    _, left = queue.take()
    with pytest.raises(TrainingError, match="feed 1 in feed 2"):
        queue.answer(left)
    fresh = Oracle(BOUNDS, 0, 1, 6)
    fresh.add(STEPS[3])
    assert np.array_equal(queue.answer(queue.take()[1])[0].places, fresh.open().places)


def test_only_queue_about_a_step_that_fits_nowhere_are_refused():
    queue = make(capacity=3)
    for own in ([1, 7], [5, 6, 7, 8], [1]):
        queue.add(1, [[np.array(own), np.array([6])]])
    for number, (what, num_steps) in enumerate([("open", 1), ("plan", 2), ("plan", 3)]):
        queue.ask(number, PlanRequest(what, 1, num_steps))
    assert len(queue.answer(queue.take()[1])[0].places) == 2
    for _ in range(2):
        with pytest.raises(ConfigError, match="rank 0 reads 4 rows, and a cache of 3"):
            queue.answer(queue.take()[1])
